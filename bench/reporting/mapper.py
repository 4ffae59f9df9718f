"""Figures about the mapper: how well it hides mapping."""

from __future__ import annotations

from .figure import Figure, most

DRIVER_PAUSES = (
    "Now and then a driver call takes 5 ms and more instead of 0.05: 5 of 40,000 mappings in a process that did "
    "nothing else, the GPU idle (map_ops, the last rows of calls), and none while another process only watched the "
    "clock. Ten thousand steps make about 80,000 such calls; the longest of these waits was 42 ms. Hiding these pauses "
    "takes pages mapped eight steps ahead, more than the 15 % of a page that lookahead may cost."
)
SLOW_MACHINE = (
    "The machine of this run was slow on the host: `step` over a driver without memory, where neither GPU nor driver "
    "has a part, took up to 2.2 times as long as in the run before (commit 9824afb: 65.0 GB/s, 15.1 us, 0.119 pages), "
    "while on one processor both commits take the same time. Lookahead follows the time that mapping takes."
)
BACKGROUND = {"measure": "stalls", "mapper": "background"}
FIGURES: tuple[Figure, ...] = (
    Figure(
        "mapper.stalls_idle_main",
        "mapper-h200.json",
        "of 10,000 steps",
        "<= 0",
        "decode steps that waited for the driver, main thread idle between steps",
        most("stalls", **BACKGROUND, steps=10_000, main_thread="idle"),
        DRIVER_PAUSES,
    ),
    Figure(
        "mapper.stalls_busy_main",
        "mapper-h200.json",
        "of 10,000 steps",
        "<= 0",
        "the same, main thread busy in pure Python between steps",
        most("stalls", **BACKGROUND, steps=10_000, main_thread="busy"),
        DRIVER_PAUSES,
    ),
    Figure(
        "mapper.lookahead_pages_max",
        "mapper-h200.json",
        "pages per request and plane",
        "<= 0.15",
        "pages mapped ahead, on average, in the worst of all steady-decode runs",
        most("lookahead_pages_per_request", **BACKGROUND),
        SLOW_MACHINE,
    ),
    Figure(
        "mapper.pages_per_s_busy_main",
        "mapper-h200.json",
        "pages/s",
        ">= 2500",
        "2 MiB pages mapped beside a main thread that holds the GIL",
        most("pages_per_s", measure="throughput", main_thread="busy", extent_pages=1),
    ),
    Figure(
        "mapper.map_gb_s_alone",
        "mapper-h200.json",
        "GB/s",
        ">= 60",
        "2 MiB pages mapped by the mapper's thread alone, handles ready",
        most("gb_per_s", measure="throughput", main_thread="idle", extent_pages=1),
        SLOW_MACHINE,
    ),
    Figure(
        "mapper.cold_2gib_ms",
        "mapper-h200.json",
        "ms",
        "<= 5",
        "wait of the first step of a 2 GiB prompt in a cold slot, with extents",
        most("stall_ms", measure="prompt", slot="cold", extent_pages=16, notice_ms=0.0),
    ),
    Figure(
        "mapper.step_us_b256",
        "mapper-h200.json",
        "us",
        "<= 10",
        "`step` with nothing to grow, 256 slots, lengths as a tensor",
        most("step_us_p50", measure="step", slots=256, growing=0, form="tensor"),
    ),
    Figure(
        "mapper.step_us_b4096",
        "mapper-h200.json",
        "us",
        "<= 25",
        "the same with 4,096 slots",
        most("step_us_p50", measure="step", slots=4096, growing=0, form="tensor"),
        SLOW_MACHINE,
    ),
)
