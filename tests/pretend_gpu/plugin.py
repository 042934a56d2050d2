"""`pytest -p tests.pretend_gpu.plugin`: the tests of this process have two pretended GPUs.

The device is installed here, before anything imports torch. The Triton kernels run in Triton's interpreter where a
test wants them, and are off otherwise: the interpreter copies every tensor to the host.
"""

import os

from tests.pretend_gpu.build import library
from tests.pretend_gpu.cuda import install

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("DLM_LENS_KERNELS", "off")
GPU = install(library())
