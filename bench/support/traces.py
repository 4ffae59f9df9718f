"""Request traces: prompt and decode lengths from a CSV file, or drawn from a distribution fitted to one.

The header of a CSV file tells its form: `ContextTokens,GeneratedTokens` (Azure's LLM inference traces of 2023) or
`num_prefill_tokens,num_decode_tokens` (the traces of vAttention's artifact). The reader ignores other columns.
"""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from slicedkv.errors import ConfigError

_MOST_DIGITS = 12
_COLUMNS = (("ContextTokens", "GeneratedTokens"), ("num_prefill_tokens", "num_decode_tokens"))


class Request(NamedTuple):
    """One request. Its first decode step holds `prompt_tokens + 1` tokens, each further one more, up to `tokens`."""

    prompt_tokens: int
    decode_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens it holds at its end."""
        return self.prompt_tokens + self.decode_tokens


class Trace(NamedTuple):
    """Requests in the order in which they came."""

    name: str
    requests: Sequence[Request]


class Fit(NamedTuple):
    """A lognormal distribution of prompt and decode lengths together, cut off at the range of its trace.

    Attributes
    ----------
    prompt_log_mean, prompt_log_sd, decode_log_mean, decode_log_sd : float
        Mean and standard deviation of the natural logarithms of the lengths in tokens.
    correlation : float
        Of the two logarithms.
    prompt_range, decode_range : (int, int)
        Shortest and longest, in tokens. A length drawn beyond them becomes the nearer of the two.
    """

    prompt_log_mean: float
    prompt_log_sd: float
    decode_log_mean: float
    decode_log_sd: float
    correlation: float
    prompt_range: tuple[int, int]
    decode_range: tuple[int, int]


FITS = {
    "azure_2023_conv": Fit(6.633, 0.985, 5.019, 0.859, 0.087, (2, 14050), (7, 1000)),
    "azure_2023_code": Fit(6.999, 1.360, 2.788, 0.847, -0.005, (3, 7437), (6, 1899)),
    "arxiv_long_offline": Fit(11.347, 0.242, 5.788, 0.720, 0.005, (63862, 192786), (17, 5153)),
    "arxiv_long_online": Fit(10.277, 0.181, 5.700, 0.611, 0.012, (22912, 45819), (6, 10845)),
    "sync_vs_async_trace": Fit(7.494, 0.064, 6.599, 0.200, 0.016, (1600, 2000), (500, 1000)),
}
"""`fit` of each public trace, by the name of its file (`python -m bench.footprint --fit --trace CSV` prints it).

Maximum likelihood gives the means and standard deviations. Drawn requests have mean lengths within 7 % of the trace's,
but for the decodes of azure_2023_code, which are 16 % shorter. Their medians are within 26 %: the prompts of a real
trace have several peaks.
"""


def read_trace(path: Path) -> Trace:
    """Read a CSV file.

    Raises
    ------
    ConfigError
        There is no such file, its header is of neither form, or a length is not a whole number of at least 1.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin theirs with a mark
            requests = _read(path, csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}; give a CSV file") from error
    if not requests:
        raise ConfigError(f"trace {path} holds no request")
    return Trace(path.stem, requests)


def _read(path: Path, rows: csv.DictReader[str]) -> list[Request]:
    names = next((names for names in _COLUMNS if set(names) <= set(rows.fieldnames or ())), None)
    if names is None:
        known = " or ".join(",".join(names) for names in _COLUMNS)
        raise ConfigError(f"trace {path} has the columns {rows.fieldnames}; it must have {known}")
    return [Request(*(_length(path, rows.line_num, name, row[name]) for name in names)) for row in rows]


def _length(path: Path, line: int, name: str, text: str | None) -> int:
    digits = (text or "").strip()
    if not digits.isdecimal() or len(digits) > _MOST_DIGITS or int(digits) < 1:
        raise ConfigError(f"trace {path}, line {line}: {name} is {text!r:.80}; it must be a whole number of at least 1")
    return int(digits)


def fit(requests: Sequence[Request]) -> Fit:
    """Return the lognormal distribution under which these requests are most likely.

    Raises
    ------
    ConfigError
        All prompts, or all numbers of decoded tokens, are the same.
    """
    if min(len({request[i] for request in requests}) for i in range(2)) < 2:
        raise ConfigError(f"{len(requests)} requests with lengths that do not differ have no distribution; give others")
    prompts, decodes = zip(*requests, strict=True)
    logs = [list(map(math.log, lengths)) for lengths in (prompts, decodes)]
    (prompt_mean, prompt_sd), (decode_mean, decode_sd) = ((statistics.fmean(x), statistics.pstdev(x)) for x in logs)
    correlation = statistics.correlation(*logs)
    prompt_range, decode_range = ((min(lengths), max(lengths)) for lengths in (prompts, decodes))
    return Fit(prompt_mean, prompt_sd, decode_mean, decode_sd, correlation, prompt_range, decode_range)


def generate(name: str, fit: Fit, count: int, seed: int = 0) -> Trace:
    """Draw a trace; the same arguments give the same trace."""
    source = random.Random(f"{name} {seed}")
    rest = math.sqrt(1 - fit.correlation**2)

    def draw() -> Request:
        first, second = source.gauss(), source.gauss()
        prompt = math.exp(fit.prompt_log_mean + fit.prompt_log_sd * first)
        decode = math.exp(fit.decode_log_mean + fit.decode_log_sd * (fit.correlation * first + rest * second))
        return Request(_within(prompt, fit.prompt_range), _within(decode, fit.decode_range))

    return Trace(f"{name} (generated)", [draw() for _ in range(count)])


def _within(value: float, bounds: tuple[int, int]) -> int:
    return max(bounds[0], min(round(value), bounds[1]))


def traces(paths: Sequence[Path], *, quick: bool) -> list[Trace]:
    """Read the files, or, without any, generate requests like those of each public trace, the short ones if `quick`."""
    if paths:
        return [read_trace(path) for path in paths]
    count, fits = (200, list(FITS.items())[:2]) if quick else (4000, FITS.items())
    return [generate(name, fit, count) for name, fit in fits]
