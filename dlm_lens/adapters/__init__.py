"""Model families: checkpoints of masked DLMs and AR baselines as native transformers models.

Names load on first use: importing this package loads no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
