"""The settings of a run as transformers' TrainingArguments."""

import logging

import torch
from transformers import TrainingArguments

from dlm_lens.training.settings import TrainingSettings

logger = logging.getLogger(__name__)


def training_arguments(settings: TrainingSettings, steps: int) -> TrainingArguments:
    """The settings as transformers' TrainingArguments."""
    arguments = TrainingArguments(
        output_dir=settings.output,
        max_steps=steps,
        per_device_train_batch_size=settings.micro_batch_size,
        learning_rate=settings.optimisation.rate,
        max_grad_norm=settings.optimisation.clip,
        bf16=settings.precision == "bf16",
        use_cpu=not torch.cuda.is_available(),
        logging_steps=settings.log_steps,
        logging_nan_inf_filter=False,
        save_strategy="no",
        eval_strategy="steps" if settings.eval_steps else "no",
        eval_steps=settings.eval_steps or None,
        metric_for_best_model="eval_loss" if settings.eval_steps else None,
        greater_is_better=False if settings.eval_steps else None,
        report_to=list(settings.report_to) or "none",
        ignore_data_skip=True,
        ddp_find_unused_parameters=False,
        seed=settings.seed,
        disable_tqdm=True,
    )
    if arguments.n_gpu > 1:
        # Without a launcher, transformers would copy the model to every GPU in one process.
        logger.warning("one GPU of %d is used; start with torchrun or accelerate launch for all", arguments.n_gpu)
        arguments._n_gpu = 1
    return arguments
