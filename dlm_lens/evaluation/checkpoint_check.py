"""`check_checkpoint`: whether a checkpoint's tokenizer and network are what this library takes them for.

A file of weights can load without an error and still be computed wrongly: another rotation, another mask token,
another order of tokens. What shows it is text: a network that reads the words of a sentence in their order predicts
them better than the same words in a random order, and the authors' own code gives the same logits.
"""

import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb, log
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.adapters.registry import family_of, fills_masks
from dlm_lens.attention import decoder_of, hooked_attentions
from dlm_lens.evaluation.tasks import toy
from dlm_lens.files.paths import user_path
from dlm_lens.files.tensor_files import read_tensors
from dlm_lens.findings import Finding, checked
from dlm_lens.placement import in_float64, input_device
from dlm_lens.printable import counted, one_line, printable_name, shown
from dlm_lens.recording import ReceivedAttention, Recording, record, record_forward
from dlm_lens.sampling import denoise, log_likelihood
from dlm_lens.sampling.likelihood.answer_pairs import Pair, read_pairs
from dlm_lens.sinks import AboveMean, find_sinks, received_of

SINGLE, HALF = 1e-3, 0.1
"""What rounding may change in float32, and in half precision, in standard deviations of the logits.

SmolLM2-135M's logits differ by 1e-6 and 0.02 between two attention functions. In the golden LLaDA a rotation
of half the frequencies makes 0.7, keys of the opposite sign in one layer 1.2.
"""
REMEDY = "write it with safetensors.torch.save_file, from input_ids and logits"


def rounding_limit(dtype: torch.dtype) -> float:
    """The largest `relative_gap` that rounding explains in a model of this dtype."""
    return SINGLE if dtype in (torch.float32, torch.float64) else HALF


def relative_gap(ours: Float[Tensor, "*entries"], theirs: Float[Tensor, "*entries"]) -> float:
    """The difference sqrt(mean (ours - theirs)^2) / std(theirs), over the entries that are finite in `theirs`.

    Infinite or no number where one of them is not finite in `ours`. [MASK] has the logit -inf in some networks.
    """
    finite = theirs.isfinite()
    expected = in_float64(theirs[finite])
    return float((in_float64(ours[finite]) - expected).square().mean().sqrt() / expected.std())


@dataclass(frozen=True, eq=False)
class ReferenceLogits:
    """Inputs of a network and the logits that another implementation returned for them.

    Args:
        input_ids: masks among them, where the network reads masks.
        logits: as the other implementation's forward pass returned them, not shifted.
        options: further inputs of the forward pass, such as an attention mask or a noise level.
        name: of the file.
    """

    input_ids: Int[Tensor, "batch position"]
    logits: Float[Tensor, "batch position d_vocab"]
    options: dict[str, Tensor]
    name: str

    @classmethod
    def read(cls, path: Path, model: Any) -> "ReferenceLogits":
        """Read a safetensors file with `input_ids`, `logits` and any other input of the model's forward pass.

        Raises:
            ValueError: there is no such file, or it is damaged; a tensor is missing, of another shape, or no input
                of the model; ids beyond its vocabulary.
        """
        tensors = read_tensors(path, REMEDY)
        missing = [name for name in ("input_ids", "logits") if name not in tensors]
        if missing:
            raise ValueError(f"{path} has no {' and no '.join(missing)}, but {sorted(tensors)}; {REMEDY}")
        ids, logits = tensors.pop("input_ids"), tensors.pop("logits")
        if ids.is_floating_point() or ids.ndim != 2 or logits.ndim != 3 or logits.shape[:2] != ids.shape:
            raise ValueError(
                f"{path} has input_ids {list(ids.shape)} ({ids.dtype}) and logits {list(logits.shape)}; they must "
                "be whole numbers [batch, position] and numbers [batch, position, d_vocab]"
            )
        rows = int(model.get_input_embeddings().weight.shape[0])
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
            raise ValueError(
                f"{path} has ids from {int(ids.min())} to {int(ids.max())}; the model embeds {rows} ids"
            )
        known = [name for each in (model, decoder_of(model)) for name in inspect.signature(each.forward).parameters]
        unknown = sorted(tensors.keys() - set(known))
        if unknown:
            raise ValueError(
                f"{path} has {', '.join(map(repr, unknown))}, which {type(model).__name__}'s forward pass does not "
                "take; leave them out"
            )
        return cls(ids.long(), logits.float(), tensors, path.name)

    @torch.no_grad()
    def compare(self, model: Any) -> Finding:
        """Whether the model's logits are these, up to rounding (`relative_gap`); padding does not count.

        Raises:
            ValueError: they have another number of columns.
        """
        device = input_device(model)
        options = {name: value.to(device) for name, value in self.options.items()}
        ours = model(input_ids=self.input_ids.to(device), **options).logits.float().cpu()
        if ours.shape != self.logits.shape:
            raise ValueError(
                f"{self.name} has logits of {self.logits.shape[-1]} tokens, and the model's have {ours.shape[-1]}"
            )
        mask = self.options.get("attention_mask")
        content = torch.ones_like(self.input_ids) if mask is None or mask.ndim != 2 else mask
        ours, theirs = ours[content.bool()], self.logits[content.bool()]
        gap, limit = relative_gap(ours, theirs), rounding_limit(model.dtype)
        same = float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())
        words = (
            f"{self.name}: logits differ by {gap:.2g} of their standard deviation (at most {limit:g}); the "
            f"likeliest token is the same at {same:.1%} of {counted(len(ours), 'position')}"
        )
        return Finding("reference", words, gap <= limit)


TEXTS = (
    "The old bridge across the river was closed for repairs after the storm last winter.",
    "Water boils at a lower temperature on a high mountain because the air pressure is lower.",
    "She opened the letter slowly, read it twice, and then put it back into the drawer.",
    "Most birds leave the northern forests in autumn and return when the snow has melted.",
    "The committee will meet on Monday morning to discuss the budget for the next year.",
    "If you mix blue and yellow paint in equal parts, you will usually get green paint.",
    "The train to the city leaves every hour, and the journey takes about forty minutes.",
    "He learned to play the piano as a child, but he stopped when he went to university.",
    "A good map shows not only the roads but also the rivers, the hills and the villages.",
    "The museum is free for children, and adults pay ten dollars for a ticket at the door.",
    "Farmers in the valley grow wheat and corn, and they sell milk and cheese at the market.",
    "The doctor told him to rest for a week, drink a lot of water and take the medicine.",
)
"""English sentences of everyday words, for models of English; others need texts of their own."""

PROMPT_WORDS = 4
"""Words of a text that are its prompt."""
SAMPLES = 16
"""Masks of each text whose likelihood is estimated."""
LEVEL = 0.01
"""Level of the sign test of whether texts are likelier than the same tokens in random order."""
GEN_LENGTH = 32
"""Tokens of the answer that is denoised."""


def check_checkpoint(
    model: Any,
    texts: Sequence[str] | None = None,
    *,
    reference: str | Path | None = None,
    gen_length: int = GEN_LENGTH,
    seed: int = 0,
) -> Iterator[Finding]:
    """Check a loaded checkpoint, finding by finding; nothing is written.

    - network: the family, the numbers of layers, heads and parameters, the dtype.
    - special ids: which tokens they are; wrong where the tokenizer has another mask token than the config.
    - texts: the tokenizer returns them as they were.
    - patterns: with the pattern of every layer formed, logits and received attention are the fused kernel's.
    - reading: texts cost fewer nats than their tokens in random order, by a sign test over texts at level 0.01.
      With the chain rule of an AR model; of a DLM with the bound of its own likelihood (`log_likelihood`), the same
      masks for both orders.
    - denoising: what the model writes after half of the first text; a recorded run writes the same.
    - sinks: how many heads have one at the first step (Eq. 3 of 2510.15731, eps 3), and the most frequent one.
    - reference: the logits of another implementation are ours (`ReferenceLogits`).

    Args:
        model: from `dlm_lens.load`.
        texts: of the language that the model was trained on, at least eight words each; without, English ones, or
            the problems of the embedded models where the tokenizer has no English.
        reference: a safetensors file with logits of another implementation.
        gen_length: tokens to denoise after the first text's half.
        seed: of masks, random orders and denoising.

    Raises:
        ValueError: a text that is too short, or a reference file that does not fit the model; before any work.
    """
    texts = default_texts(model) if texts is None else tuple(texts)
    for number, text in enumerate(texts):
        if not isinstance(text, str) or len(text.split()) < 2 * PROMPT_WORDS:
            raise ValueError(
                f"text {number} is {shown(text)}; a text has at least {2 * PROMPT_WORDS} words, of which the first "
                f"{PROMPT_WORDS} are its prompt"
            )
    if not texts:
        raise ValueError("texts is empty; give at least one text, or leave it out for English sentences")
    stored = None if reference is None else ReferenceLogits.read(user_path(reference), model)
    return _Checks(model, texts, stored, gen_length, seed).findings()


@dataclass(frozen=True, eq=False)
class _Checks:
    """The checks of one model."""

    model: Any
    texts: tuple[str, ...]
    reference: ReferenceLogits | None
    gen_length: int
    seed: int

    def findings(self) -> Iterator[Finding]:
        """Every finding, in the order of their costs."""
        yield Finding("network", self._network(), None)
        if self.model.tokenizer is None:
            yield Finding("tokenizer", "none in the files: texts cannot be checked", None)
        else:
            yield checked("special ids", self._special_ids)
            texts = checked("texts", self._texts)
            yield texts
            if texts.good:
                yield checked("patterns", self._patterns)
                yield checked("reading", self._reading)
                yield from self._denoising()
        if self.reference is not None:
            stored = self.reference
            yield checked("reference", lambda: stored.compare(self.model))

    @property
    def pairs(self) -> list[Pair]:
        """The texts, with their first words as prompts."""
        words = [text.split() for text in self.texts]
        prompts = [" ".join(each[:PROMPT_WORDS]) for each in words]
        answers = [" " + " ".join(each[PROMPT_WORDS:]) for each in words]
        return read_pairs(self.model, prompts, answers)

    def _network(self) -> str:
        config = self.model.config
        parameters = sum(weight.numel() for weight in self.model.parameters())
        devices = ", ".join(sorted({str(weight.device) for weight in self.model.parameters()}))
        return (
            f"{family_of(config.model_type).name}: {type(self.model).__name__}, {parameters:,} parameters, "
            f"{counted(config.num_hidden_layers, 'layer')}, {counted(config.num_attention_heads, 'head')}, "
            f"{str(self.model.dtype).removeprefix('torch.')} on {devices}"
        )

    def _special_ids(self) -> Finding:
        config, tokenizer = self.model.config, self.model.tokenizer
        written = []
        for name in ("mask", "bos", "eos", "eot", "pad"):
            ids = getattr(config, f"{name}_token_id", None)
            for token in ids if isinstance(ids, list) else [] if ids is None else [ids]:
                text = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else "after the tokenizer's"
                written.append(f"{name} {token} ({printable_name(str(text))})")
        mask, theirs = getattr(config, "mask_token_id", None), getattr(tokenizer, "mask_token_id", None)
        if mask is not None and theirs is not None and mask != theirs:
            return Finding(
                "special ids",
                f"the config's mask token is {mask}, and the tokenizer's is {theirs}: give "
                f"load(mask_token_id={theirs}), or another tokenizer",
                False,
            )
        return Finding("special ids", ", ".join(written) or "none")

    def _texts(self) -> Finding:
        for text in self.texts:
            back = _returned(self.model.tokenizer, text)
            if not _alike(back, text):
                return Finding(
                    "texts",
                    f"the tokenizer returns {shown(text)} as {shown(back)}; give texts of the model's language "
                    "(--texts), one in a line",
                    False,
                )
        return Finding("texts", f"the tokenizer returns all {len(self.texts)} as they were")

    def _canvas(self) -> Int[Tensor, "1 position"]:
        """The first text, with every third token after the prompt masked where the model has a mask token."""
        pair = self.pairs[0]
        tokens, mask = pair.tokens.clone(), getattr(self.model.config, "mask_token_id", None)
        if mask is not None:
            tokens[len(pair.prompt) :: 3] = mask
        return tokens[None].to(input_device(self.model))

    def _patterns(self) -> Finding:
        canvas = self._canvas()
        fused, received = _recorded(self.model, canvas)
        handles = [each.hook_pattern.register_forward_hook(_form) for each in hooked_attentions(self.model)]
        try:
            formed, summed = _recorded(self.model, canvas)
        finally:
            for handle in handles:
                handle.remove()
        gap, limit = relative_gap(formed, fused), rounding_limit(self.model.dtype)
        moved = float((summed - received).abs().max() / summed.abs().max())
        words = (
            f"with patterns formed, logits differ by {gap:.1g} of their standard deviation, and received attention "
            f"by {moved:.1g} of its largest (at most {limit:g})"
        )
        return Finding("patterns", words, gap <= limit and moved <= limit)

    def _reading(self) -> Finding:
        pairs, generator = self.pairs, torch.Generator().manual_seed(self.seed)
        orders = [torch.randperm(len(pair.answer), generator=generator) for pair in pairs]
        prompts = [pair.prompt.tolist() for pair in pairs] * 2
        answers = [pair.answer.tolist() for pair in pairs]
        answers += [pair.answer[order].tolist() for pair, order in zip(pairs, orders, strict=True)]
        try:
            found = log_likelihood(self.model, prompts, answers, samples=SAMPLES, seed=self.seed)
        except ValueError as error:
            if fills_masks(self.model.config):
                raise
            return Finding("reading", one_line(error), None)  # of most models of uniform noise none is defined
        lengths = torch.tensor([len(answer) for answer in answers[: len(pairs)]], dtype=torch.float64)
        inorder, random = (-found.value / lengths.repeat(2)).view(2, -1)
        better, needed = int((inorder < random).sum()), least_successes(len(pairs))
        words = (
            f"{inorder.mean():.2f} nats a token; {random.mean():.2f} in random order, {_uniform(self.model):.2f} "
            f"for a uniform guess; {better} of {counted(len(pairs), 'text')} better in order"
        )
        if needed is None:
            return Finding("reading", f"{words} (fewer than 7 texts prove nothing at level {LEVEL})", None)
        return Finding("reading", f"{words} (at least {needed})", better >= needed)

    def _denoising(self) -> Iterator[Finding]:
        """A recorded run beside a plain one, and the sinks of its first step."""
        words = self.texts[0].split()
        prompt = " ".join(words[: len(words) // 2])
        settings: dict[str, Any] = {"gen_length": self.gen_length, "seed": self.seed}
        recordings: list[Recording] = []

        def compare() -> Finding:
            """The plain run beside the recorded one."""
            start = time.perf_counter()
            recording = record(self.model, prompt, [ReceivedAttention()], **settings)
            middle = time.perf_counter()
            # A recording has no cache, and the rounding of one can decide between two tokens.
            cache = {name: value for name, value in recording.run.settings.items() if name == "use_cache"}
            run = denoise(self.model, prompt, **settings, **cache)
            end = time.perf_counter()
            recordings.append(recording)
            told = (
                f"{shown(prompt)} -> {shown(run.answers[0])}; {counted(run.steps, 'step')}, "
                f"{(end - middle) / run.steps:.2g} s each, recorded {(middle - start) / run.steps:.2g} s"
            )
            if not torch.equal(run.tokens, recording.run.tokens):
                return Finding("denoising", f"a recorded run wrote other tokens: {told}", False)
            return Finding("denoising", told)

        yield checked("denoising", compare)
        if recordings:
            yield checked("sinks", lambda: Finding("sinks", _sinks(recordings[0]), None))


def default_texts(model: Any) -> tuple[str, ...]:
    """`TEXTS`, or the problems of the embedded models where the tokenizer knows those alone."""
    tokenizer = model.tokenizer
    if tokenizer is not None and not _alike(_returned(tokenizer, TEXTS[0]), TEXTS[0]):
        texts = tuple(map(toy.whole, toy.documents()[: len(TEXTS)]))
        if all(_alike(_returned(tokenizer, text), text) for text in texts):
            return texts
    return TEXTS


def _returned(tokenizer: Any, text: str) -> str:
    return str(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]))


def _alike(one: str, other: str) -> bool:
    """Whether two texts are the same but for spaces and capitals, which some tokenizers change."""
    return "".join(one.split()).casefold() == "".join(other.split()).casefold()


def _form(module: Any, inputs: Any, pattern: Tensor) -> None:
    """A hook that reads nothing; while it is there, patterns are formed."""


@torch.no_grad()
def _recorded(
    model: Any, canvas: Int[Tensor, "1 position"]
) -> tuple[Float[Tensor, "1 position d_vocab"], Float[Tensor, "..."]]:
    """Logits of a canvas, and the attention that its keys receive, 0 where it is undefined."""
    with record_forward(model, [ReceivedAttention()]) as seen:
        logits = model(input_ids=canvas).logits
    return logits.float(), seen.received.nan_to_num(0.0)


def _sinks(recording: Recording) -> str:
    sinks = find_sinks(received_of(recording), AboveMean(eps=3.0))
    table = sinks.table()
    first: Any = table[table["step"] == recording.steps[0]]
    heads = len(first.groupby(["layer", "head"]))
    if not heads:
        return "no head has a sink at the first step"
    (position, token), count = next(iter(first.groupby(["position", "token"]).size().nlargest(1).items()))
    often = f"position {position} ({shown(token)}, {counted(count, 'head')})"
    return f"{counted(heads, 'head')} with a sink at the first step; most often {often}"


def _uniform(model: Any) -> float:
    """Nats of a token that is guessed uniformly from the vocabulary."""
    return log(int(model.config.vocab_size))


def least_successes(count: int, level: float = LEVEL) -> int | None:
    """The least successes of `count` fair coins whose probability, or more, is at most `level`; None if none is."""
    tail = 0.0
    for successes in range(count, -1, -1):
        tail += comb(count, successes) / 2**count
        if tail > level:
            return successes + 1 if successes < count else None
    return None
