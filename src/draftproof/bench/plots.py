"""Pictures of a bench, in one style. Knows figures and matplotlib; measures nothing."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from draftproof.bench.figures import GENERATE, PLAIN, Figures
from draftproof.bench.measure import Setting
from draftproof.bench.report import Report
from draftproof.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2328", "#57606a", "#e4e8ec"
PLAIN_COLOUR, STOCK_COLOURS = "#8c959f", ("#c9a227", "#7d5a1e", "#a67c52")
COLOURS = ("#2563a8", "#d1603d", "#2a9d6f", "#8250b5", "#c2447e", "#3aa6b9")
PARTS = {"prefill": "#c3ccd5", "draft": "#eeb04c", "verify": "#4b607c", "decide": "#a184bd", "other": "#e4e8ec"}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": "#c9d1d9",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titlecolor": MUTED,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.dpi": 160,
}
PATCH = {"facecolor": "white", "linewidth": 0, "pad": 0.6}
CURVE: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.8}
SIZE, WIDE = (6.4, 3.8), (13.2, 3.8)


def must_be_there() -> None:
    """Raises BadInput, in one sentence, where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BadInput("plots need matplotlib; install it with: pip install 'draftproof[plots]'") from error


def draw(report: Report) -> dict[str, bytes]:
    """Every picture there is something to show in: PNG by file name."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first = _first(report)
    painters: dict[str, tuple[bool, Callable[[Figure, Report], None]]] = {
        "speed-up": (any(figures.way != PLAIN and figures.speed_up for figures in report.figures), _speed_up),
        "costs": (bool(report.costs), _costs),
        "parts": (any(figures.seconds_per_token for figures in first), _time),
        "acceptance": (any(figures.acceptance_by_position for figures in first), _acceptance),
        "tokens-per-round": (any(figures.way not in (PLAIN, GENERATE) for figures in first), _rounds),
    }
    pictures = {}
    with rc_context(STYLE):
        for name, (something, paint) in painters.items():
            if something:
                figure = Figure(figsize=WIDE if name == "speed-up" else SIZE, layout="constrained")
                FigureCanvasAgg(figure)
                paint(figure, report)
                out = io.BytesIO()
                figure.savefig(out, format="png", metadata={"Software": None})
                pictures[name] = out.getvalue()
    return pictures


def _titled(figure: Figure, report: Report, title: str, setting: Setting | None = None) -> None:
    left = 0.08 / figure.get_figwidth()
    figure.suptitle(f"{title}\n", x=left, ha="left", fontsize=11, fontweight="bold", color=INK)
    about = report.name if setting is None else f"{report.name}: {setting.title}"
    figure.text(left, 0.925, about, ha="left", va="top", fontsize=8.5, color=MUTED)


def _speed_up(figure: Figure, report: Report) -> None:
    """Bars by batch, one panel per temperature, with the line below which speculation costs."""
    shown = [figures for figures in report.figures if figures.way != PLAIN and figures.speed_up is not None]
    panels = _panels(figure, [setting.temperature for setting in report.settings])
    for temperature, axes in panels.items():
        mine = [figures for figures in shown if figures.setting.temperature == temperature]
        ways, batches = _unique([f.way for f in mine]), _unique([f.setting.batch for f in mine])
        width = 0.8 / max(4, len(ways))
        for index, way in enumerate(ways):
            for figures in mine:
                if figures.way == way and figures.speed_up is not None:
                    place = batches.index(figures.setting.batch) + (index - (len(ways) - 1) / 2) * width
                    found = figures.speed_up
                    axes.bar(place, found.median, width * 0.86, color=_colour(way, report), label=way)
                    if found.low is not None and found.high is not None:
                        error = [[found.median - found.low], [found.high - found.median]]
                        axes.errorbar(place, found.median, error, color=INK, linewidth=1, capsize=2.5)
                    top = found.high if found.high is not None else found.median
                    said = f"{found.median:.2f}×"
                    axes.annotate(said, (place, top), (0, 3), textcoords="offset points", ha="center", fontsize=8, bbox=PATCH)
        axes.axhline(1.0, color=INK, linewidth=1)
        axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
        margin = 0.55 if len(batches) > 1 else 1.1
        axes.set_xlim(-margin, len(batches) - 1 + margin)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
        axes.set_title(_law(temperature))
    first = next(iter(panels.values()))
    first.set_ylabel("speed-up over plain decoding")
    _legend(figure, list(panels.values()), columns=8)
    _titled(figure, report, "How many times as fast as plain decoding")


def _costs(figure: Figure, report: Report) -> None:
    """T(k) / T(1): what it costs to verify several tokens at once."""
    axes = figure.add_subplot()
    for index, (rows, curve) in enumerate(report.costs.items()):
        relative = [seconds / curve.seconds[0] for seconds in curve.seconds]
        label = f"{rows} row{'s' * (rows != 1)}, one token each: {1000 * curve.seconds[0]:.1f} ms"
        axes.plot(curve.widths, relative, **CURVE, color=COLOURS[index % len(COLOURS)], label=label)
    axes.axhline(1.0, color=INK, linewidth=1)
    axes.set_xscale("log", base=2)
    widths = [width for width in (1, 2, 4, 8, 16, 32, 64) if width <= max(max(curve.widths) for curve in report.costs.values())]
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_ylim(0, axes.get_ylim()[1])
    axes.set_xlabel("tokens per row in one forward, k")
    axes.set_ylabel("T(k) / T(1)")
    axes.legend(loc="upper left")
    _titled(figure, report, "What it costs to verify several tokens at once")


def _acceptance(figure: Figure, report: Report) -> None:
    """By position, and by category where there are several."""
    shown = [figures for figures in _first(report) if figures.acceptance_by_position]
    several = len({name for figures in shown for name in figures.categories}) > 1
    left = figure.add_subplot(1, 1 + several, 1)
    for figures in shown:
        shares, colour = [100 * share for share in figures.acceptance_by_position], _colour(figures.way, report)
        left.plot(range(1, len(shares) + 1), shares, **CURVE, label=figures.way, color=colour, clip_on=False)
    left.set_ylim(0, 100)
    left.xaxis.get_major_locator().set_params(integer=True)         # type: ignore[call-arg]
    left.set_xlabel("position in the draft")
    left.set_ylabel("accepted, % of those reached")
    if several:
        _by_category(figure.add_subplot(1, 2, 2), shown, report)
    _legend(figure, [left])
    _titled(figure, report, "What the target accepts", shown[0].setting)


def _by_category(axes: Axes, shown: Sequence[Figures], report: Report) -> None:
    names = _unique([name for figures in shown for name in figures.categories])
    height = 0.8 / len(shown)
    for index, figures in enumerate(shown):
        for row, name in enumerate(names):
            found = figures.categories.get(name)
            if found is not None and found.acceptance is not None:
                place = row + (index - (len(shown) - 1) / 2) * height
                axes.barh(place, 100 * found.acceptance, height * 0.86, color=_colour(figures.way, report))
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.set_xlim(0, 100)
    axes.set_xlabel("accepted, %")


def _rounds(figure: Figure, report: Report) -> None:
    """How many tokens rounds gave."""
    shown = [figures for figures in _first(report) if figures.way not in (PLAIN, GENERATE)]
    axes, width = figure.add_subplot(), 0.84 / len(shown)
    for index, figures in enumerate(shown):
        total = sum(figures.rounds_by_tokens.values())
        places = [tokens + (index - (len(shown) - 1) / 2) * width for tokens in figures.rounds_by_tokens]
        shares = [100 * count / total for count in figures.rounds_by_tokens.values()]
        label = f"{figures.way}: {figures.tokens_per_round:.2f} on average"
        axes.bar(places, shares, width * 0.92, color=_colour(figures.way, report), label=label)
    axes.xaxis.get_major_locator().set_params(integer=True)         # type: ignore[call-arg]
    axes.set_xlim(left=0.4)
    axes.set_xlabel("tokens of a round")
    axes.set_ylabel("% of rounds")
    _legend(figure, [axes], columns=2)
    _titled(figure, report, "How many tokens a round gives", shown[0].setting)


def _time(figure: Figure, report: Report) -> None:
    """Milliseconds per token, stacked by part."""
    axes = figure.add_subplot()
    shown = [figures for figures in _first(report) if figures.seconds_per_token is not None]
    for row, figures in enumerate(shown):
        left = 0.0
        for part, seconds in (figures.seconds_per_token or {}).items():
            size, colour = 1000 * seconds, PARTS.get(part, MUTED)
            axes.barh(row, size, 0.62, left=left, color=colour, label=part, edgecolor="white", linewidth=0.6)
            left += size
        axes.annotate(f"{left:.1f}", (left, row), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), [figures.way for figures in shown])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.set_xlabel("milliseconds per token")
    axes.margins(x=0.08)
    _legend(figure, [axes], columns=len(PARTS))
    _titled(figure, report, "Where the time goes", shown[0].setting)


def _panels(figure: Figure, temperatures: Sequence[float]) -> dict[float, Axes]:
    """One panel per temperature, side by side, on one scale."""
    several = _unique(temperatures)
    grid: Any = figure.subplots(1, len(several), sharey=True, squeeze=False)
    return dict(zip(several, grid[0], strict=True))


def _legend(figure: Figure, panels: Sequence[Axes], columns: int = 4) -> None:
    """Each name once, below everything."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(list(found.values()), list(found), loc="outside lower left", ncols=min(columns, len(found)), fontsize=8.5)


def _first(report: Report) -> list[Figures]:
    """The figures of the first setting: pictures of single rounds are of it, the others stand in tables."""
    return report.of(report.settings[0]) if report.settings else []


def _law(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def _colour(way: str, report: Report) -> str:
    """Of a way, the same in every picture."""
    ways = [one.name for one in report.bench.ways]
    stock = [name for name in ways if name.startswith(GENERATE)]
    ours = [name for name in ways if name != PLAIN and name not in stock]
    if way == PLAIN:
        return PLAIN_COLOUR
    return STOCK_COLOURS[stock.index(way) % 3] if way in stock else COLOURS[ours.index(way) % len(COLOURS)]


def _unique(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
