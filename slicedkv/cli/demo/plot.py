"""Draws the demo's memory over time as a PNG. The only module that uses matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import BackendUnavailableError, ConfigError
from .report import MemoryLog

__all__ = ["check_plot", "draw"]

_MIB = 1 << 20
_MEASURED, _USED = "#1f4e79", "#8fbcdb"
_MODELLED = ("#5b8db8", "#d9822b", "#7a9a3a", "#b5485d", "#8a6fb0", "#777777")


def check_plot(path: Path) -> None:
    """Find out before a long run whether the plot could be written after it. Leaves no file and changes none.

    Raises
    ------
    BackendUnavailableError
        matplotlib is missing.
    ConfigError
        The file cannot be written.
    """
    _figure()
    try:
        was_there = path.exists() or path.is_symlink()
        with path.open("ab"):
            pass
        if not was_there:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def draw(log: MemoryLog, path: Path, title: str) -> None:
    """Write the PNG: used and mapped memory over time, and the fullest moment of each layout.

    Raises
    ------
    ConfigError
        The file cannot be written.
    """
    figure = _figure()
    over_time, at_peak = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_over_time(over_time, log)
    _draw_fullest(at_peak, log)
    figure.legend(*over_time.get_legend_handles_labels(), fontsize="small", loc="outside lower center", ncols=4)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the plot cannot be written to {path}: {error.strerror}; give another file with --plot")


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure  # not pyplot, which looks for a display
    except ImportError as error:
        raise BackendUnavailableError("the plot needs matplotlib; pip install 'slicedkv[demo]'") from error
    return Figure(figsize=(12.5, 5.4), layout="constrained")


def _draw_over_time(axes: Any, log: MemoryLog) -> None:
    seconds = [moment.seconds for moment in log.moments]
    for model, colour in zip(log.models, _MODELLED, strict=False):
        held = [model.held_bytes(moment.seq_lens) / _MIB for moment in log.moments]
        axes.plot(seconds, held, "--", color=colour, linewidth=1.2, label=f"{model.name} (modelled)")
    used = [moment.used_bytes / _MIB for moment in log.moments]
    axes.fill_between(seconds, used, color=_USED, label="used: K and V of active requests")
    mapped = [moment.mapped_bytes / _MIB for moment in log.moments]
    axes.step(seconds, mapped, where="pre", color=_MEASURED, linewidth=2.2, label=f"{log.name} (measured)")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("seconds")
    axes.set_ylabel("MiB, logarithmic")
    axes.set_title("memory of K and V over time", fontsize="medium")
    axes.grid(alpha=0.3)


def _draw_fullest(axes: Any, log: MemoryLog) -> None:
    moment = log.fullest
    names = [f"{log.name}\n(measured)", *(f"{model.name}\n(modelled)" for model in log.models)]
    held = [moment.mapped_bytes, *(model.held_bytes(moment.seq_lens) for model in log.models)]
    bars = axes.barh(names, [num_bytes / _MIB for num_bytes in held], color=(_MEASURED, *_MODELLED)[: len(names)])
    axes.bar_label(bars, fmt="%.0f", padding=3, fontsize="small")
    axes.axvline(moment.used_bytes / _MIB, color=_USED, linewidth=2, label=f"used: {moment.used_bytes / _MIB:.0f} MiB")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.tick_params(axis="y", labelsize="small")
    axes.set_xlabel("MiB")
    axes.set_title(f"the fullest moment, {moment.seconds:.1f} s: {sum(moment.seq_lens):,} tokens", fontsize="medium")
    axes.legend(fontsize="small", loc="lower right")
