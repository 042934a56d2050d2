"""`HarnessLM`: a model of this library as a language model of lm-evaluation-harness."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from dlm_lens.evaluation.missing import MISSING

try:
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(MISSING.format(error)) from error

from dlm_lens.adapters import load
from dlm_lens.evaluation.encoding import Encoder
from dlm_lens.evaluation.generation import Generator, Job, Text
from dlm_lens.evaluation.likelihoods import Around, Item, Likelihoods
from dlm_lens.evaluation.processes import SharedLM
from dlm_lens.evaluation.responses import Responses, fingerprint
from dlm_lens.evaluation.seeding import repeats, request_key, request_seed
from dlm_lens.evaluation.settings import GenerationSettings, LikelihoodSettings, changed, read_settings
from dlm_lens.evaluation.wishes import JobMaker
from dlm_lens.hooks.expressions import parse_hooks


@register_model("dlm_lens")
class HarnessLM(SharedLM):
    """A diffusion or AR model for lm-evaluation-harness, with interventions in force in every forward pass.

    `lm_eval.simple_evaluate(model=HarnessLM(model), tasks=[...])`. Every request has a seed of its own, from `seed`
    and its text, so that its answer depends neither on the batch size nor on the other requests (up to the rounding
    of differently shaped matrix products).

    Args:
        model: from `dlm_lens.load`, or what that loads.
        hooks: values of `dlm_lens.hooks`, one or several, or an expression of them such as "mask_positions(0)".
        likelihood: `LikelihoodSettings`, or a mapping of their names.
        generation: `GenerationSettings`, or a mapping of their names; they win over the task's.
        seed: of all random numbers.
        batch_size: canvases per forward; None (or "auto") for as many as fit into bounded memory.
        responses: a JSONL file to append every answer to; the same call with the same file goes on where a killed
            one stopped.
        around: called with the model, returns a context manager that is entered around every chunk of likelihoods
            and every generation: where a recording listens (`lambda model: dl.record_forward(model, reducers)`).
        add_bos: put the beginning-of-text token in front of every text (Dream's authors do).
        max_length: positions of a canvas; None for the model's.
        device: where to load a model that is given by name.
        max_batch_size: the harness's argument for its own search of a batch size; not used.
        **loading: further arguments of `dlm_lens.load`, for a model given by name.

    Raises:
        ValueError: settings that cannot work, before anything is computed.
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
        around: Around | None = None,
        add_bos: bool = False,
        max_length: int | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        **loading: Any,
    ) -> None:
        super().__init__()
        self.hooks = _hooks(hooks)
        self.likelihood = read_settings(LikelihoodSettings, likelihood)
        self.generation = read_settings(GenerationSettings, generation)
        self.batch_size = _batch_size(batch_size)
        loading |= {} if device is None else {"device_map": device}
        if isinstance(model, str):
            model = load(model, **loading)
        elif loading:
            raise ValueError(f"the model is loaded already, so {', '.join(loading)} cannot be heeded; leave it out")
        if not hasattr(model, "sampler_defaults"):
            raise ValueError(f"{type(model).__name__} has no sampler; load the model with dlm_lens.load")
        self.model, self.seed = model, int(seed)
        self._device, self.around = model.device, around
        self.encoder = Encoder(model, add_bos=add_bos, max_length=max_length)
        self.jobs = JobMaker(model, self.encoder, self.generation, self.seed)
        self.responses = Responses(self._own_file(responses), self.get_model_info()["dlm_lens"])

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.encoder.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's request caches."""
        return str(self.tokenizer.name_or_path or type(self.tokenizer).__name__).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What the answers depend on, for the results' config."""
        return {
            "dlm_lens": {
                "model": str(self.model.config._name_or_path),
                "fingerprint": fingerprint(self.model),
                "hooks": [repr(hook) for hook in self.hooks],
                "likelihood": changed(self.likelihood),
                "generation": changed(self.generation),
                "seed": self.seed,
                "add_bos": self.encoder.add_bos,
                "max_length": self.encoder.max_length,
            }
        }

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's template, for the harness's records."""
        return str(getattr(self.tokenizer, "chat_template", None) or "") if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as text.

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        return self.encoder.chat(chat_history, add_generation_prompt)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Log-likelihoods ln p(continuation | context), in nats, and whether greedy decoding writes it."""
        greedy = self._asked_greedily(requests)

        def items(left: Sequence[int]) -> list[Item]:
            return [self._item(index, requests[index].args, greedy[index]) for index in left]

        keys = [
            request_key("loglikelihood", [*request.args, asked])
            for request, asked in zip(requests, greedy, strict=True)
        ]

        def run(left: Sequence[int]) -> Iterator[dict[int, Any]]:
            for answers in self._likelihoods().run(items(left)):
                yield {answer.place: [answer.value, answer.is_greedy] for answer in answers}

        found = self._answered("loglikelihood", requests, keys, run)
        return [(float(value), bool(same)) for value, same in found]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Log-likelihood ln p(text) of every request, in nats.

        A text longer than the model's context is cut into windows, each given the tokens before it.
        """
        keys = [request_key("loglikelihood_rolling", request.args) for request in requests]

        def run(left: Sequence[int]) -> Iterator[dict[int, Any]]:
            windows = [item for index in left for item in self._windows(index, requests[index].args[0])]
            items = [item._replace(place=number) for number, item in enumerate(windows)]
            waiting = {index: sum(item.place == index for item in windows) for index in left}
            totals = dict.fromkeys(left, 0.0)
            for answers in self._likelihoods().run(items):
                for answer in answers:
                    owner = windows[answer.place].place
                    totals[owner] += answer.value
                    waiting[owner] -= 1
                yield {index: totals.pop(index) for index in list(totals) if not waiting[index]}
            yield totals

        return [float(value) for value in self._answered("loglikelihood_rolling", requests, keys, run)]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """The text that every request's context is continued with, up to its end or a stop sequence."""
        copies = repeats([id(request) for request in requests])
        keys = [
            request_key("generate_until", request.args, copy)
            for request, copy in zip(requests, copies, strict=True)
        ]

        def run(left: Sequence[int]) -> Iterator[dict[int, Any]]:
            generator = Generator(self.model, batch_size=self.batch_size, hooks=self.hooks, around=self.around)
            jobs = [self.jobs.job(index, requests[index].args, copies[index]) for index in left]
            for texts in self._staged(generator, jobs):
                yield {text.place: text.text for text in texts}

        return [str(text) for text in self._answered("generate_until", requests, keys, run)]

    def _answered(
        self,
        kind: str,
        requests: Sequence[Any],
        keys: Sequence[str],
        run: Callable[[Sequence[int]], Iterator[dict[int, Any]]],
    ) -> list[Any]:
        """Answers in the order of the requests; equal requests are asked once, kept answers not at all."""
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        answers: dict[str, Any] = {key: self.responses[key] for key in first if key in self.responses}
        left = [index for key, index in first.items() if key not in answers]
        with tqdm(total=len(first), initial=len(answers), desc=kind, unit="request", disable=self.rank != 0) as bar:
            for new in run(left) if left else ():
                named = {keys[index]: answer for index, answer in new.items()}
                self.responses.append(named)
                for index, answer in new.items():
                    kept = tuple(answer) if isinstance(answer, list) else answer
                    self.cache_hook.add_partial(kind, requests[index].args, kept)
                answers |= named
                bar.update(len(named))
        return [answers[key] for key in keys]

    def _likelihoods(self) -> Likelihoods:
        return Likelihoods(
            self.model, self.likelihood, batch_size=self.batch_size, hooks=self.hooks, around=self.around
        )

    def _asked_greedily(self, requests: Sequence[Any]) -> list[bool]:
        if self.likelihood.is_greedy is not None:
            return [self.likelihood.is_greedy] * len(requests)
        documents = [(request.task_name, request.doc_id) for request in requests]
        count = Counter(documents)
        return [document[0] is None or count[document] == 1 for document in documents]

    def _item(self, index: int, arguments: tuple[str, str], greedy: bool) -> Item:
        context, continuation = arguments
        before, after = self.encoder.pair(context, continuation)
        if self.likelihood.append_eos:
            after = [*after, int(self.encoder.eos)]
        return Item(index, self.encoder.fitted(before, len(after)), after, request_seed(self.seed, context), greedy)

    def _windows(self, index: int, text: str) -> list[Item]:
        ids = self.encoder.text(text)
        ids = ids[1:] if ids[:1] == [self.encoder.prefix] else ids
        # The harness counts an AR model's inputs, which lack the last token; a canvas holds it.
        windows = get_rolling_token_windows(ids, self.encoder.prefix, self.encoder.max_length - 1, context_len=1)
        return [
            Item(index, before, after, request_seed(self.seed, text, number), False)
            for number, (before, after) in enumerate(map(make_disjoint_window, windows))
        ]

    def _staged(self, generator: Generator, jobs: Sequence[Job]) -> Iterator[list[Text]]:
        if self.generation.stages == 1:
            yield from generator.run(jobs)
            return
        first = {job.place: job._replace(until=()) for job in jobs}
        for texts in generator.run(list(first.values())):
            second = [self.jobs.second(first[text.place], self._everything(text)) for text in texts]
            for finished in generator.run(second):
                yield [text._replace(text=self._everything(text)) for text in finished]

    def _own_file(self, path: str | Path | None) -> Path | None:
        """Every process appends to a file of its own."""
        if path is None or self.world_size == 1:
            return None if path is None else Path(path)
        return Path(path).with_suffix(f".{self.rank}{Path(path).suffix}")

    def _everything(self, text: Text) -> str:
        return str(self.tokenizer.decode(text.ids, skip_special_tokens=True))


def _hooks(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return parse_hooks(value)
    return (value,) if hasattr(value, "site") else tuple(value)


def _batch_size(value: int | str | None) -> int | None:
    if value is None or value == "auto":
        return None
    number = int(value) if str(value).isdigit() else 0
    if number < 1:
        raise ValueError(f"batch_size is {value!r}; it must be at least 1, or 'auto'")
    return number
