"""Attribution over (layer, head, step) and edges: exact patching, its gradients, circuits."""
