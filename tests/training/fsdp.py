"""A training whose weights accelerate's FSDP2 shards among gloo processes; run by torchrun.

accelerate shards on accelerators alone: the processes are told that they have GPUs, with the CPU as device.
"""

import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType

from tests.training import job

usual = PartialState.__init__


def pretend(self: PartialState, *args: Any, **options: Any) -> None:
    usual(self, *args, **options)
    self._shared_state["distributed_type"] = DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState.__init__ = pretend  # type: ignore[method-assign]
    job.main(Path(sys.argv[1]), sys.argv[2:])
