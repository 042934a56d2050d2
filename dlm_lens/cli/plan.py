"""`dlm-lens plan`: memory and time of a run on a GPU, from a checkpoint's config.json alone."""

from typing import Annotated

import typer

from dlm_lens.cli.options import SETTINGS, check_least, loading_options, sampler_settings
from dlm_lens.option_values import one_of
from dlm_lens.printable import echo
from dlm_lens.training.gpus import DEVICES, UTILISATION


def plan_command(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A directory with a config.json, or a hub name; no weights are read.")
    ],
    device: Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")] = "h100",
    prompt_length: Annotated[int, typer.Option(help="Tokens of every prompt.")] = 128,
    gen_length: Annotated[int | None, typer.Option(help="Tokens of the answer.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    settings: Annotated[list[str] | None, SETTINGS] = None,
    sampler_choice: Annotated[
        list[str] | None,
        typer.Option(
            "--load",
            help="The checkpoint's sampler, such as sampler=dmax; a plan takes no other argument of load.",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="Prompts in one run.")] = 1,
    bits: Annotated[int, typer.Option(help="Per weight: 16, or 8 or 4 after quantisation.")] = 16,
) -> None:
    """Print how much memory and time a run needs at most, and whether it fits."""
    one_of("--device", device, tuple(DEVICES))
    one_of("--bits", str(bits), ("4", "8", "16"))
    check_least(1, prompt_length=prompt_length, gen_length=gen_length, steps=steps, rows=rows)
    chosen_model = loading_options(sampler_choice)
    if other := next((name for name in chosen_model if name != "sampler"), None):
        raise ValueError(f"--load {other}: a plan reads config.json alone, and takes sampler; leave it out")
    from dlm_lens.adapters.model_names import check_model_name

    check_model_name(model)
    given = sampler_settings(context.command, {"gen_length": gen_length, "steps": steps}, settings or ())
    from dlm_lens.sampling.run_plan import plan_run

    plan = plan_run(model, prompt_length=prompt_length, rows=rows, bits=bits, **chosen_model, **given)
    chosen = DEVICES[device]
    fits = "fits" if plan.memory <= chosen.memory else "does not fit: fewer bits, fewer rows, or several devices"
    echo(
        f"{plan}\n{device} ({chosen.memory / 1e9:.0f} GB): {fits}; about {chosen.seconds(plan.flops):.2g} s at "
        f"{UTILISATION:.0%} of its peak, which is assumed, not measured; reading the weights from memory at every "
        "step is not counted"
    )
