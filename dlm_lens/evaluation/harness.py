"""`HarnessLM`: a model of this library as a language model of lm-evaluation-harness."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from tqdm.auto import tqdm

from dlm_lens.adapters import load
from dlm_lens.adapters.model_names import name_of
from dlm_lens.arguments import SEED, check_values, flag, whole
from dlm_lens.attention import attached_hooks, checked, is_hook, refuse_row_lists
from dlm_lens.attention.hook_identity import identity_of
from dlm_lens.evaluation.encoding import Encoder, tokenizer_digest
from dlm_lens.evaluation.generation_requests import Generator, Job, JobMaker, Text
from dlm_lens.evaluation.likelihood_requests import (
    Around,
    ItemMaker,
    Likelihoods,
    check_likelihood_hooks,
    check_settings,
    has_greedy,
    of_every_token,
)
from dlm_lens.evaluation.request_recordings import (
    INDEX,
    RecordedGenerator,
    RecordedLikelihoods,
    RecordSettings,
    RequestBatch,
    RequestRecordings,
    read_record,
)
from dlm_lens.evaluation.responses import Responses, fingerprint
from dlm_lens.evaluation.settings import (
    GenerationSettings,
    LikelihoodSettings,
    changed,
    read_settings,
    repeats,
    request_key,
)
from dlm_lens.files.locks import held
from dlm_lens.hooks.expressions import parse_hooks
from dlm_lens.placement import input_device
from dlm_lens.recording.model_identity import request_of_model
from dlm_lens.sampling.settings import check_model

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ImportError(
        f"evaluation needs lm-evaluation-harness ({error}); install it with: pip install 'dlm-lens[eval]'"
    ) from error


logger = logging.getLogger(__name__)

_RULES = {"seed": SEED, "add_bos": flag(), "max_length": whole()}


class SharedLM(LM):
    """The harness's language model in one process, or in one of several under torchrun.

    `torch.distributed.init_process_group` must have been called before the model is created.
    """

    def __init__(self) -> None:
        super().__init__()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._rank = torch.distributed.get_rank()
            self._world_size = torch.distributed.get_world_size()

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """Create the model from the harness's arguments."""
        return super().create_from_arg_string(arg_string, _with_available_device(additional_config or {}))

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """Create the model from the harness's arguments."""
        return super().create_from_arg_obj(arg_dict, _with_available_device(additional_config or {}))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The concatenated tensors of all processes."""
        if self.world_size == 1:
            return tensor
        parts = [torch.zeros_like(tensor.reshape(-1)) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, tensor.reshape(-1))
        return torch.cat(parts)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all processes, gathered in process `dst`."""
        if self.world_size == 1:
            return [obj]
        found: list[Any] | None = [None] * self.world_size if self.rank == dst else None
        torch.distributed.gather_object(obj, found, dst=dst)
        return found

    def barrier(self) -> None:
        """Wait for the other processes."""
        if self.world_size > 1:
            torch.distributed.barrier()


def _with_available_device(config: Mapping[str, Any]) -> dict[str, Any]:
    """The harness's arguments with an available device: its command line defaults to cuda:0."""
    device = str(config.get("device"))
    if device.startswith("cuda") and not torch.cuda.is_available():
        logger.warning("the harness requests %s, and there is no CUDA device; the model goes to the CPU", device)
        return {**config, "device": "cpu"}
    return dict(config)


@register_model("dlm_lens")
class HarnessLM(SharedLM):
    """A diffusion or AR model for lm-evaluation-harness, with interventions in every forward pass.

    `lm_eval.simple_evaluate(model=HarnessLM(model), tasks=[...])`. Every request has its own seed, derived from
    `seed` and its text: its answer depends neither on the batch size nor on the other requests, up to the rounding
    of differently shaped matrix products.

    Args:
        model: from `dlm_lens.load`, or a name that it loads.
        hooks: values of `dlm_lens.hooks`, one or several, or an expression of them such as "mask_positions(0)".
        likelihood: `LikelihoodSettings`, or a mapping of their names.
        generation: `GenerationSettings`, or a mapping of their names; they override the task's.
        seed: of all random numbers.
        batch_size: canvases per forward; None (or "auto") for as many as fit into bounded memory.
        responses: a JSONL file for all answers; the same call with the same file resumes a killed evaluation.
        record: reducers as `dlm_lens.record` takes them, or their names as in `dlm-lens record --reducers`, or
            `RecordSettings`: what is recorded of every request.
        record_to: the directory of the recordings, TASK/DOCUMENT-REQUEST each; without `record` it is received
            attention that is recorded. The same call with the same directory resumes. Requests are then computed
            one by one.
        around: takes the model and returns a context manager for every chunk of likelihoods and every generation,
            such as a recording of your own. With `responses`, its code identifies it, as `identity_of` says.
        add_bos: prepend the beginning-of-text token to every text (as Dream's authors do).
        max_length: positions of a canvas; None for the model's.
        device: where to load a model that is given by name.
        max_batch_size: an argument of the harness; not used.
        **loading: further arguments of `dlm_lens.load`, for a model given by name.

    Raises:
        ValueError: invalid settings, or `around` with `record`, before anything is computed; or a hook, or
            `around`, that holds an object by which stored answers cannot be identified, such as an open file.
    """

    def __init__(
        self,
        model: Any,
        *,
        hooks: str | Sequence[Any] = (),
        likelihood: LikelihoodSettings | Mapping[str, Any] | None = None,
        generation: GenerationSettings | Mapping[str, Any] | None = None,
        seed: int = 0,
        batch_size: int | str | None = None,
        responses: str | Path | None = None,
        record: RecordSettings | Mapping[str, Any] | Sequence[Any] | str | None = None,
        record_to: str | Path | None = None,
        around: Around | None = None,
        add_bos: bool = False,
        max_length: int | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        **loading: Any,
    ) -> None:
        super().__init__()
        # They may come from the harness's command line, where --model_args are texts.
        check_values({"seed": seed, "add_bos": add_bos, "max_length": max_length}, _RULES)
        self.hooks = _hooks(hooks)
        self.likelihood = read_settings(LikelihoodSettings, likelihood)
        self.generation = read_settings(GenerationSettings, generation)
        recorded = read_record(record, record_to)
        if recorded is not None and around is not None:
            raise ValueError(
                "around is given with record: requests that are recorded run without it; give interventions as "
                "hooks=, or leave record and record_to out"
            )
        self.batch_size = _batch_size(batch_size)
        loading |= {} if device is None else {"device_map": device}
        if isinstance(model, str):
            model = load(model, **loading)
        elif loading:
            raise ValueError(f"the model is loaded already, so {', '.join(loading)} cannot be used; leave them out")
        check_model(model)
        self.model, self.seed = model, int(seed)
        self._device, self.around = input_device(model), around
        self._stores = responses is not None or recorded is not None
        self.encoder = Encoder(model, add_bos=add_bos, max_length=max_length)
        self.jobs = JobMaker(model, self.encoder, self.generation, self.seed)
        self.items = ItemMaker(self.encoder, self.likelihood, self.seed, has_greedy(model))
        self.greedy_tasks: frozenset[str] = frozenset()
        identity = self.get_model_info()["dlm_lens"]
        self._holders = 0
        self.recordings: RequestRecordings | None = None
        self.responses = Responses(self._own_file(responses), identity)
        if recorded is not None:
            try:
                self.recordings = self._recordings(recorded, record_to, identity)
            except BaseException:
                self.responses.forget()
                raise

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.encoder.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's request caches."""
        return str(self.tokenizer.name_or_path or type(self.tokenizer).__name__).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Everything that the answers depend on, for the config of the results."""
        return {
            "dlm_lens": {
                "model": name_of(self.model),
                "fingerprint": fingerprint(self.model),
                "hooks": [self._identity("hooks", hook) for hook in (*self.hooks, *attached_hooks(self.model))],
                "around": None if self.around is None else self._identity("around", self.around),
                "likelihood": changed(self.likelihood),
                "generation": changed(self.generation),
                "tokenizer": tokenizer_digest(self.tokenizer),
                "seed": self.seed,
                "add_bos": self.encoder.add_bos,
                "max_length": self.encoder.max_length,
                **self._sampler_defaults,
            }
        }

    @property
    def _sampler_defaults(self) -> dict[str, str]:
        """The model's sampler, and its settings of generations that are given nowhere else."""
        given = {**self.generation.sampler(), "gen_length": self.generation.gen_length}
        found = request_of_model(self.model, given)["defaults"]
        # A name each: a refusal of stored answers shows one of them. Products in float32 are in the fingerprint.
        return {f"sampler_defaults.{name}": text for name, text in found.items() if name != "float32 products"}

    def _identity(self, name: str, value: Any) -> str:
        """What tells the value of the argument `name` apart from others, where answers are stored.

        Raises:
            ValueError: nothing does.
        """
        try:
            return identity_of(value, strict=self._stores)
        except ValueError as error:
            raise ValueError(
                f"{name} holds {value!r:.120}, in which {error}, so that its answers cannot be stored; leave out "
                "`responses` and `record_to`, or give a function of plain values"
            ) from None

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's chat template, for the harness's records."""
        return str(getattr(self.tokenizer, "chat_template", None) or "") if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as text.

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        return self.encoder.chat(chat_history, add_generation_prompt)

    def check_likelihoods(self, *, rolling: bool = False) -> None:
        """Refuse settings that the model's likelihoods do not have, and hooks that need the steps of a run.

        Args:
            rolling: whether the requests are whole texts, for which `is_greedy` has no meaning.

        Raises:
            ValueError: naming the setting or the hook, before any request is computed.
        """
        check_settings(self.model, self.likelihood, rolling=rolling)
        check_likelihood_hooks(self.model, self.hooks)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Log-likelihoods ln p(continuation | context) in nats, and whether they are greedy completions."""
        greedy = self.items.needs_greedy(requests, self.greedy_tasks)
        arguments = [[*request.args, one] for request, one in zip(requests, greedy, strict=True)]
        batch = RequestBatch(requests, [request_key("loglikelihood", one) for one in arguments])

        def run(left: Sequence[int]) -> Iterator[dict[int, Any]]:
            items = [self._item(index, requests[index], greedy[index]) for index in left]
            for answers in self._likelihoods(batch).run(items):
                yield {answer.place: [answer.value, answer.is_greedy] for answer in answers}

        return [(float(value), bool(same)) for value, same in self._answered("loglikelihood", batch, run)]

    def _item(self, index: int, request: Any, greedy: bool) -> Any:
        """The likelihood of a request, by which an error names its document."""
        try:
            return self.items.item(index, request.args, greedy)
        except ValueError as error:
            raise ValueError(f"{error}; it is of document {request.doc_id} of {request.task_name}") from None

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Log-likelihood ln p(text) of every request, in nats.

        A text longer than the model's context is cut into windows, each given the tokens before it. Every token is
        scored once, also the last one of a window, which Dream's masks spare elsewhere (`of_every_token`).
        """
        batch = RequestBatch(requests, [request_key("loglikelihood_rolling", request.args) for request in requests])

        def run(left: Sequence[int]) -> Iterator[dict[int, Any]]:
            """Score the windows of these requests; yield the totals of those that are done."""
            windows = [item for index in left for item in self.items.windows(index, requests[index].args[0])]
            items = [item._replace(place=number) for number, item in enumerate(windows)]
            owners = [item.place for item in windows]
            waiting, totals = Counter(owners), dict.fromkeys(left, 0.0)
            every = of_every_token(self.model, self.likelihood)
            for answers in self._likelihoods(batch.at(owners), every).run(items):
                for answer in answers:
                    totals[owners[answer.place]] += answer.value
                    waiting[owners[answer.place]] -= 1
                yield {index: totals.pop(index) for index in list(totals) if not waiting[index]}
            yield totals

        return [float(value) for value in self._answered("loglikelihood_rolling", batch, run)]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """The generated continuation of every request's context, up to its end or a stop sequence."""
        copies = repeats([id(request) for request in requests])
        if self.world_size > 1:
            # The harness pads each process's share with copies, which are not draws of their own.
            copies = [copy % max(1, one.repeats or 1) for copy, one in zip(copies, requests, strict=True)]
        drawn = zip(requests, copies, strict=True)
        batch = RequestBatch(
            requests, [request_key("generate_until", one.args, copy) for one, copy in drawn], copies
        )

        def run(left: Sequence[int]) -> Iterator[dict[int, Any]]:
            jobs = [self.jobs.job(index, requests[index].args, copies[index]) for index in left]
            for texts in self._staged(self._generator(batch), jobs):
                yield {text.place: text.text for text in texts}

        return [str(text) for text in self._answered("generate_until", batch, run)]

    def _answered(
        self, kind: str, batch: RequestBatch, run: Callable[[Sequence[int]], Iterator[dict[int, Any]]]
    ) -> list[Any]:
        """Answers in the order of the requests; equal requests are computed once, stored answers not at all."""
        with self.held():
            return self._computed(kind, batch, run)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the directories of answers and recordings against other evaluations; nested locks have no effect.

        Raises:
            ValueError: another process or thread evaluates there; or hooks of `attach_hooks`, which stored answers
                would not name.
        """
        if self._stores and (attached := attached_hooks(self.model)):
            raise ValueError(
                f"{', '.join(map(repr, attached))} of attach_hooks, and answers are stored: they would not name "
                "it, and would be given to the model without it; give hooks=[...] instead"
            )
        shared, path = self.world_size > 1, self.responses.path
        with ExitStack() as stack:
            if self.recordings is not None:
                stack.enter_context(self.recordings.held(shared=shared))
            together = self.recordings is not None and path is not None and _same(path.parent, self.recordings.to)
            if path is not None and not self._holders and not together:
                stack.enter_context(held(path.parent, shared=shared))
                self.responses.refresh()
            self._holders += 1
            try:
                yield
            finally:
                self._holders -= 1

    def forget(self) -> None:
        """Remove the files of this evaluation that were made for it and hold no answer yet."""
        if self.recordings is not None:
            self.recordings.forget()
        # They were made first, and with them folders that may hold the recordings too.
        self.responses.forget()

    def _computed(
        self, kind: str, batch: RequestBatch, run: Callable[[Sequence[int]], Iterator[dict[int, Any]]]
    ) -> list[Any]:
        first = {key: index for index, key in reversed(list(enumerate(batch.keys)))}
        # Where requests are recorded, an answer counts only with its recording.
        kept = self.responses if self.recordings is None else self.recordings
        answers: dict[str, Any] = {key: kept[key] for key in first if key in kept}
        self.responses.append(answers)
        left = sorted(index for key, index in first.items() if key not in answers)
        if left and kind != "generate_until":
            self.check_likelihoods(rolling=kind == "loglikelihood_rolling")
        with tqdm(total=len(first), initial=len(answers), desc=kind, unit="request", disable=self.rank != 0) as bar:
            for new in run(left) if left else ():
                answers |= self._kept(kind, batch, new)
                bar.update(len(new))
        return [answers[key] for key in batch.keys]

    def _kept(self, kind: str, batch: RequestBatch, new: Mapping[int, Any]) -> dict[str, Any]:
        named = {batch.keys[index]: answer for index, answer in new.items()}
        if self.recordings is not None:
            for index, answer in new.items():
                self.recordings.settle(batch, index, kind, answer)
        self.responses.append(named)
        for index, answer in new.items():
            whole = tuple(answer) if isinstance(answer, list) else answer
            self.cache_hook.add_partial(kind, batch.requests[index].args, whole)
        return named

    def _likelihoods(
        self, batch: RequestBatch, likelihood: LikelihoodSettings | None = None
    ) -> Likelihoods | RecordedLikelihoods:
        given = self.likelihood if likelihood is None else likelihood
        settings: dict[str, Any] = {"batch_size": self.batch_size, "hooks": self.hooks}
        if self.recordings is None:
            return Likelihoods(self.model, given, **settings, around=self.around)
        return RecordedLikelihoods(self.recordings, batch, given, **settings)

    def _generator(self, batch: RequestBatch) -> Generator | RecordedGenerator:
        if self.recordings is None:
            return Generator(self.model, batch_size=self.batch_size, hooks=self.hooks, around=self.around)
        return RecordedGenerator(self.recordings, batch, self.hooks)

    def _staged(self, generator: Generator | RecordedGenerator, jobs: Sequence[Job]) -> Iterator[list[Text]]:
        if self.generation.stages == 1:
            yield from generator.run(jobs)
            return
        first = {job.place: job._replace(until=()) for job in jobs}
        for texts in generator.run(list(first.values())):
            second = [self.jobs.second_stage(first[text.place], self._everything(text)) for text in texts]
            for finished in generator.run(second):
                yield [text._replace(text=self._everything(text)) for text in finished]

    def _recordings(
        self, settings: RecordSettings, to: str | Path | None, identity: Mapping[str, Any]
    ) -> RequestRecordings:
        assert to is not None  # checked by read_record
        return RequestRecordings(self.model, settings, Path(to), identity, str(self._own_file(INDEX)))

    def _own_file(self, path: str | Path | None) -> Path | None:
        """The file of this process: every process appends to its own."""
        if path is None or self.world_size == 1:
            return None if path is None else Path(path)
        return Path(path).with_suffix(f".{self.rank}{Path(path).suffix}")

    def _everything(self, text: Text) -> str:
        return str(self.tokenizer.decode(text.ids, skip_special_tokens=True))


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _hooks(value: Any) -> tuple[Any, ...]:
    given = parse_hooks(value) if isinstance(value, str) else [value] if is_hook(value) else value
    found = tuple(checked(given))
    refuse_row_lists(found, "an evaluation makes its own batches; give one list for all rows")
    return found


def _batch_size(value: int | str | None) -> int | None:
    if value is None or value == "auto":
        return None
    number = int(value) if str(value).isdigit() else 0
    if number < 1:
        raise ValueError(f"batch_size is {value!r}; it must be at least 1, or 'auto'")
    return number
