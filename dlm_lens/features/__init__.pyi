from .checkpoints import load_sae as load_sae
from .checkpoints import save_sae as save_sae
from .sparse_autoencoder import SparseAutoencoder as SparseAutoencoder
from .sparse_autoencoder import random_decoder as random_decoder
from .sparse_autoencoder import untrained as untrained
