"""Errors as one sentence, with options of the command line instead of arguments of Python."""

import errno
import re
from collections.abc import Mapping
from functools import partial

from dlm_lens.recording.reducer_registry import REDUCERS

PHRASES = (
    (r"dlm_lens\.record\(\.\.\., to=\) writes (one|some)", r"dlm-lens record writes \1"),
    (r"pass (the right )?(\w+_token_id)= to dlm_lens\.load", r"put \1\2 into its config.json"),
    (r"take a part, such as recording\.select\(.*\)$", "record fewer steps or shorter answers"),
    (
        r"give find_sinks a KeyStatistic \(key_statistic_over_steps\) instead of received attention",
        "give --detector a rule of received attention, such as above-mean:3",
    ),
    (r"(has no learned sink tokens); give the Sinks of find_sinks", r"\1; leave out --learned"),
    (
        r"so it takes token ids only; or set model\.tokenizer",
        "which texts and chats need: put its files (tokenizer.json) into the directory of the weights, or give "
        'ids, {"input_ids": [...]}',
    ),
    (
        r"give at least one token \(ids of the BOS token alone will do\)",
        'give a text with a word in it, or {"input_ids": [...]} with the BOS token alone',
    ),
    (r"pass revision= one of the cached commits \(", "give the directory of a cached commit ("),
)
"""Advice for Python -> advice for a command line."""

HEADER = (
    ("dtype", "storage", r"'(\w+)'"),
    ("model dtype", "dtype", r"'torch\.(\w+)'"),
    ("layers", "layers", r"\[([\d, ]*)\]"),
)
"""What the header of a recording calls the value of a parameter of `dlm-lens record`, the parameter, the value."""

ALIASES = {"to": "out", "device_map": "device", "apply_chat_template": "chat"}
"""Parameters in Python whose options have another name."""


def as_command_line(sentence: str, options: Mapping[str, str]) -> str:
    """An error's sentence with the arguments of a function as options of a command: seed=3 becomes --seed 3.

    Arguments in the parentheses of a call, such as AboveMean(eps=3.0), are left as they are.

    Args:
        sentence: the sentence of the error.
        options: a parameter's name in Python -> its option.
    """
    if "loading" in options:
        sentence = _with_load(sentence)
    for pattern, replacement in PHRASES:
        sentence = re.sub(pattern, replacement, sentence)
    sentence = re.sub(r"\b(record with|or) (\w+)\(([^()]*)\)", _with_reducer, sentence)
    if not options:
        return sentence
    if "gen_length" in options and options.get("settings") == "--set":
        sentence = _with_settings(sentence, options)
    for name, parameter, text in HEADER:
        if option := options.get(parameter, options.get(f"record_{parameter}", "")):
            both = re.compile(rf"\bwith {name} = {text}, and now it is {text}")
            sentence = both.sub(partial(_of_header, option), sentence)
    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    parts = re.split(r"([\w.]+\([^()]*\))", sentence)
    # Every second part is a call.
    parts[::2] = [_with_options(text, names, options) for text in parts[::2]]
    return "".join(parts)


def _with_load(sentence: str) -> str:
    """Advice of arguments as options: "pass size= to dlm_lens.load" is "give --load size="."""
    sentence = re.sub(
        r"\bpass ([^;:]*?) to dlm_lens\.load",
        lambda found: "give " + re.sub(r"\b(\w+)=", r"--load \1=", found[1]),
        sentence,
    )
    sentence = re.sub(r"\bpass revision= (?=one of the cached commits)", "give --load revision= ", sentence)
    return re.sub(r"(?<=give its base model and )adapter=", "--load adapter=", sentence)


def _with_reducer(found: re.Match[str]) -> str:
    """A reducer that is to be recorded, ValueNorm('mean'), as its option: --reducers value-norm:mean."""
    before, kind, setting = found.groups()
    names = [entry.name for entry in REDUCERS.values() if entry.kind == kind]
    if not names or not re.fullmatch(r"""(\w+=)?(['"]\w+['"])?""", setting):
        return found[0]
    text = re.sub(r"""^\w+=|['"]""", "", setting)
    return f"{before} --reducers {names[0]}{':' * bool(text)}{text}"


def _with_settings(sentence: str, options: Mapping[str, str]) -> str:
    """Settings of a run as its command takes them: as options, and with `--set` those that have none.

    In the list of a sampler's settings, and where a directory holds a recording with other ones.
    """

    def given(name: str, text: str) -> str:
        if text == "None":
            return f"without {options.get(name, f'--set {name}')}"
        value = text.strip("'\"")
        return f"with {options[name]} {value}" if name in options else f"with --set {name}={value}"

    def differing(found: re.Match[str]) -> str:
        return f"{given(found[1], found[2])}, and now {given(found[1], found[3])}"

    def listed(found: re.Match[str]) -> str:
        names = found[2].split(", ")
        own = [options[name] for name in names if name in options]
        others = [name for name in names if name not in options]
        return found[1] + ", ".join(own) + f"; with --set: {', '.join(others)}" * bool(others)

    value = r"(None|'[^']*'|\"[^\"]*\")"
    sentence = re.sub(rf"\bwith settings (\w+) = {value}, and now it is {value}", differing, sentence)
    # Every prompt has the command's seed.
    same = r"\[(\d+)(?:, \{0})*\]"
    seeds = rf"\bwith settings (seed)s = {same.format(2)}, and now it is {same.format(3)}"
    sentence = re.sub(seeds, differing, sentence)
    return re.sub(r"(sampler has no setting .*; it has )([\w, ]+)$", listed, sentence)


def _of_header(option: str, found: re.Match[str]) -> str:
    before, now = (text.replace(", ", ",") for text in found.groups())
    return f"with {option} {before}, and now with {option} {now}"


def _with_options(text: str, names: str, options: Mapping[str, str]) -> str:
    def option(found: re.Match[str]) -> str:
        return options[found[1]]

    # seed=..., and seed= at the end of a clause; then layers=[0, 1], seed=3; then a name that begins the sentence.
    text = re.sub(rf"(?<![\w.-])({names})=(?:\.\.\.)?(?=[\s,;:.)]|$)", option, text)
    listed = rf"(?<![\w.-])({names})=\[([-\d, ]+)\]"
    text = re.sub(listed, lambda found: f"{options[found[1]]} {found[2].replace(' ', '')}", text)
    text = re.sub(rf"(?<![\w.-])({names})=", lambda found: f"{options[found[1]]} ", text)
    text = re.sub(rf"^({names})(?= (?:is|must|has)\b)", option, text)
    # No word of a sentence has an underscore.
    return re.sub(rf"(?<![\w./-])({names})(?![\w./-])", lambda m: options[m[1]] if "_" in m[1] else m[1], text)


def sentence_of(error: Exception) -> str:
    """The error's own sentence; for an error of the operating system or the hub, one that names a remedy."""
    # An OSError that this package raises has a sentence and no number.
    number, path = getattr(error, "errno", None), getattr(error, "filename", None)
    remedies = {
        errno.EEXIST: "is a file already; give another directory",
        errno.ENOTDIR: "lies below a file, not below a directory; give another path",
        errno.EISDIR: "is a directory; give the name of a file in it",
        errno.ENOENT: "does not exist; make its directory first, or give another path",
        errno.EACCES: "may not be written or read by you; give another path",
        errno.EPERM: "may not be written or read by you; give another path",
        errno.EROFS: "is on a disk that cannot be written; give another path",
        errno.ENOSPC: "does not fit on its disk; make room, and give the same command again",
    }
    if number == errno.ENOSPC:
        path = path or "the output"  # a stream's error names no file
    if number in remedies and path:
        return f"{path} {remedies[number]}"
    if isinstance(error, ConnectionError):
        return f"{error}; try again with a connection; files that were downloaded are kept"
    return str(error) or type(error).__name__
