"""The harness's own command line with this package's model: `python -m dlm_lens.evaluation --model dlm_lens`.

lm-evaluation-harness has no entry points: its models have to be imported before its command line looks for them.
"""

from lm_eval.__main__ import cli_evaluate

import dlm_lens.evaluation.harness  # noqa: F401  (registers the model)

if __name__ == "__main__":
    cli_evaluate()
