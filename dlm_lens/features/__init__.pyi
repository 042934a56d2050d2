from .checkpoints import load_sae as load_sae
from .checkpoints import save_sae as save_sae
from .nulls import random_decoder as random_decoder
from .nulls import untrained as untrained
from .sparse_autoencoder import SparseAutoencoder as SparseAutoencoder
