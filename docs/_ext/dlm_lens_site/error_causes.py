"""What causes the errors of each part of the library, and what to do: one group per page of the troubleshooting."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """One page of errors.

    Args:
        page: name of its file.
        title: what the reader was doing.
        modules: prefixes of the modules, without "dlm_lens."; the longest that fits decides.
        cause: why these errors arise, Markdown.
        remedy: what to do, Markdown.
    """

    page: str
    title: str
    modules: tuple[str, ...]
    cause: str
    remedy: str


GROUPS = (
    Group(
        "arguments",
        "Arguments of any function",
        ("arguments", "option_values", "shapes", "declarations", "placement", "display", "public_names", ""),
        "Arguments are checked before any work is done. The sentence begins with the name of the argument, "
        "then the value that was received, then what it must be. The same sentences come from the "
        "constructors of results, whose shapes are checked.",
        "Give the value that the sentence asks for; the [reference](../api/index.rst) has the type of every "
        "argument. On the command line the same sentence names the option.",
    ),
    Group(
        "loading",
        "Loading a model",
        ("adapters", "adapters.loading", "adapters.hub", "adapters.model_names"),
        "`dl.load` reads config.json, compares it with the headers of the weights, and builds a native model; "
        "it never runs or unpickles what came with a checkpoint. These errors name the file or setting that "
        "does not fit, before weights are read.",
        "Check the spelling of the name (`dlm-lens families` lists the families; embedded models are toy, "
        "toy-sink, toy-gated and toy-ar) and that the files are complete; without a network give a directory. "
        "A setting that the checkpoint lacks is an argument of `dl.load`: [models](../../models.md).",
    ),
    Group(
        "config-files",
        "Configuration files of checkpoints",
        (
            "adapters.config_fields",
            "adapters.registry",
            "adapters.families",
            "adapters.masked_diffusion",
            "adapters.dit",
        ),
        "A field of config.json has a value that the family's network cannot have, or an option that is not "
        "implemented and would change numbers silently.",
        "Fetch the config.json that belongs to the weights. If the model was changed on purpose, its option "
        "is not implemented here: the pages of [families](../../families.md) say what each was verified with.",
    ),
    Group(
        "weight-files",
        "Weight files, pickles and tokenizer files",
        ("adapters.weight_headers", "adapters.weights_only", "adapters.tokenizer_files", "adapters.smollm2"),
        "Weights are read from safetensors files only, whose headers are checked; pickles (`.bin`, `.pt`) can "
        "execute code when they are read and are refused. A Git LFS pointer is a text file in place of the "
        "weights. Some tokenizers consist of Python code, which is not executed.",
        "Fetch the file again (`git lfs pull`), convert pickled weights to safetensors on a machine that may "
        "run them, or pass a tokenizer with `tokenizer=`.",
    ),
    Group(
        "memory-and-quantisation",
        "Memory, devices and quantised weights",
        ("adapters.memory", "adapters.quantisation", "probes.untrained"),
        "The weights do not fit on the device, lie on a disk in a way that the layers cannot share, or are "
        "quantised by a package that is missing or does not fit the family.",
        'Load with `device_map="auto"`, another dtype, or unquantised, as the sentence says; `dlm-lens plan '
        "MODEL` prints what a run needs. See [models](../../models.md).",
    ),
    Group(
        "sink-tokens",
        "Learned sink tokens and encoder-decoder canvases",
        ("adapters.sink_tokens", "adapters.encoder_decoder", "adapters.head", "attention.sink_layout"),
        "A model with learned sink tokens has keys beside the canvas, `sink(i)`; DiffusionGemma has an "
        "encoder for the prompt and a decoder for the canvas. The input does not fit that layout.",
        "Count positions on the canvas and name sinks `sink(0)`; see [sink tokens](../../sink_tokens.md) and "
        "[DiffusionGemma](../../diffusion_gemma.md).",
    ),
    Group(
        "attention",
        "Hook points in attention",
        ("attention", "testing"),
        "The model has no hook points, its attention cannot be hooked exactly and would give wrong numbers "
        "silently, or statistics were asked of a pass that does not have them.",
        "Load with `dl.load`, or add hook points with `dl.add_hook_points`. An attention class that is "
        "refused by name has a part that the hook points would miss; the sentence says which. See "
        "[hooks](../../hooks.md).",
    ),
    Group(
        "prompts",
        "Prompts and settings of a run",
        ("sampling", "sampling.prompts", "sampling.settings", "sampling.denoising", "sampling.run_plan"),
        "A prompt is empty, has the wrong type or shape, or contains tokens that the model does not have; or "
        "a setting does not go with the others (blocks that do not divide the answer, steps that do not "
        "divide among blocks).",
        "See [denoising](../../denoising.md) for the forms of a prompt and the settings of each family.",
    ),
    Group(
        "samplers",
        "Samplers, caches and networks",
        (
            "sampling.samplers",
            "sampling.cached_network",
            "sampling.sub_block_network",
            "sampling.network",
            "sampling.loop",
            "sampling.observers",
        ),
        "A setting of the family's own algorithm has a value that the original implementation does not have "
        "either, a cache is asked to do what only the full pass can, or an observer edits what the cache "
        "holds already.",
        "The sentence names setting and range. [Samplers](../samplers.md) lists the settings of every "
        "sampler, [caches](../../caches.md) what a cache excludes.",
    ),
    Group(
        "likelihood",
        "Likelihoods",
        ("sampling.likelihood",),
        "Prompts and answers do not pair, an answer is empty or too long, or an estimate is asked with a "
        "setting of another.",
        "See [likelihood](../../likelihood.md): which estimate takes which setting.",
    ),
    Group(
        "results-of-runs",
        "Results of runs",
        ("sampling.denoising_run", "sampling.stored_run", "sampling.comparison", "sampling.token_text"),
        "A result of another kind was given, or two runs do not pair: they differ in prompt, length or steps.",
        "Give the `DenoisingRun` that `dl.denoise` returned, and make both runs of a pair with the same "
        "prompt, settings and seed (`dl.compare` does).",
    ),
    Group(
        "nnsight",
        "Tracing with nnsight",
        ("tracing",),
        "A trace reads or edits at a place or a step that is not there, is nested in another, or was never run.",
        "Read inside `with lm.generate(...) as tracer`, in the order in which the model runs, and save what "
        "you want to keep with `.save()`. See [tracing](../../tracing.md).",
    ),
    Group(
        "transformerlens",
        "TransformerLens bridges",
        ("bridging",),
        "A bridge is built over a model that has one, a step cache is asked for a name or step that it does "
        "not have, or a feature needs the family's own sampler.",
        "Build the bridge from what `dl.load` returned and run `bridge.denoise`. See "
        "[TransformerLens](../../transformerlens.md).",
    ),
    Group(
        "hooks",
        "Interventions",
        ("hooks",),
        "A hook was made with values that contradict each other, or it reaches a model, layer, head or step "
        "that it does not fit. Hooks are checked when they are made and again when a run begins, before the "
        "first pass.",
        "See [hooks](../../hooks.md) and [comparing](../../comparing.md); every hook prints as the call that "
        "makes it.",
    ),
    Group(
        "hook-expressions",
        "Hook expressions on the command line",
        ("hooks.expressions",),
        "An expression such as `mask_top_sinks(5)` is read as a literal call of a public hook, and nothing "
        "else is evaluated.",
        "Write a call of a name of `dlm_lens.hooks` with literal arguments; the sentence names the character "
        "at which reading stopped.",
    ),
    Group(
        "recording",
        "Recording statistics",
        ("recording",),
        "A reducer does not fit the model or the run, an array or statistic was not recorded, or recordings "
        "of different runs are put together.",
        "Record with the reducer that has the statistic (`reducers=[...]`, `--reducers`); "
        "[recording](../../recording.md) lists them.",
    ),
    Group(
        "recordings-on-disk",
        "Recordings on disk",
        (
            "recording.storage",
            "recording.shards",
            "recording.directories",
            "recording.activation_shards",
            "recording.recording_set",
        ),
        "The directory is empty, holds something else or another run, or a file in it is damaged or missing. "
        "A recording is continued only with the same prompts, settings, model and reducers.",
        "Give the same command to continue a recording, or another directory. A damaged directory can be "
        "deleted and recorded again.",
    ),
    Group(
        "files",
        "Files and locks",
        ("files",),
        "A file is damaged (its checksum is another), nested too deeply, too large, a directory where a file "
        "is needed, or another process is writing it. Files are written whole or not at all.",
        "Wait for the other process, give another path, or make the file again.",
    ),
    Group(
        "sinks",
        "Sinks and detectors",
        ("sinks",),
        "Scores and rule do not fit: the tensor is no pattern, the scale or level is another, or a detector's "
        "expression cannot be read.",
        "See [sinks](../../sinks.md): what a detector takes, and how one is written (`--detector above-mean:3`).",
    ),
    Group(
        "trajectories",
        "Trajectories and statistics of sinks",
        ("sinks.sink_trajectories", "sinks.lifetimes", "sinks.analysis", "sinks.token_classes"),
        "An analysis needs steps, several sequences, or a tokenizer, and what was given has none.",
        "Give sinks of a whole run (`dl.find_sinks(dl.received_over_steps(model, run), ...)`); see "
        "[trajectories](../../trajectories.md).",
    ),
    Group(
        "probes",
        "Probes of finished runs",
        ("probes",),
        "A probe needs a kind of run (an AR run, a run with a cache, one without a mask token) that has no "
        "answer to its question, or a layer, position or step that is not there.",
        "The page of the probe says what it takes: [what you can ask of a run](../../questions.md).",
    ),
    Group(
        "attribution",
        "Attribution and circuits",
        ("probes.attribution",),
        "The graph, the runs and the metric of an attribution belong to different models, steps or canvases.",
        "See [attribution](../../attribution.md).",
    ),
    Group(
        "features",
        "Sparse autoencoders",
        ("features", "probes.feature_insertion"),
        "The checkpoint of an autoencoder is of an architecture or has an option that is not implemented, or "
        "it was trained on an activation of another width.",
        "See [features](../../features.md): which formats are read.",
    ),
    Group(
        "figures",
        "Pictures and reports",
        ("viz",),
        "The first argument is not what the picture draws, an option belongs to another picture, or a layer, "
        "head, row or step is not there.",
        "See [pictures](../../pictures.md): which function takes what; `dlm-lens plot list` says it for the "
        "command line.",
    ),
    Group(
        "training",
        "Training",
        ("training",),
        "A setting of the run, its data or its start does not fit; or training stopped, because the loss is "
        "not finite or a signal came.",
        "A stopped training resumes from its last whole checkpoint with the same command. See "
        "[training](../../training.md).",
    ),
    Group(
        "training-configs",
        "Configuration files of trainings",
        (
            "training.config_files",
            "training.settings",
            "training.data",
            "training.dataset_files",
        ),
        "A YAML file of a training, or an override `key=value`, has an unknown name or a value that cannot be.",
        "The sentence names file and field; [training](../../training.md) lists the fields.",
    ),
    Group(
        "evaluation",
        "Evaluation",
        ("evaluation",),
        "The harness is missing, a task or preset is unknown, or a request cannot be answered by this kind of "
        "model.",
        "Install with `pip install 'dlm-lens[eval]'`; see [evaluation](../../evaluation.md).",
    ),
    Group(
        "experiments",
        "Experiments",
        ("experiments",),
        "The directory holds results of other settings, or none yet, or the settings of an experiment "
        "contradict each other.",
        "Give another `--out`, or the same settings to continue. `dlm-lens experiment list` says what there is.",
    ),
    Group(
        "command-line",
        "The command line",
        ("cli",),
        "An option has a value that the command cannot use, or a file or directory is not what the command reads.",
        "`dlm-lens COMMAND --help` and the [command line](../command-line.md) say what each option takes.",
    ),
)
