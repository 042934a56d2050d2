from .families.mmada import ImageLayout as ImageLayout
from .loading import load as load
from .model_names import embedded_models as embedded_models
from .registry import Family as Family
from .registry import family_of as family_of
