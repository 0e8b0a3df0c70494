"""A report as pictures. The only folder that knows matplotlib."""

import matplotlib
from matplotlib.figure import Figure

from llama.bench.report.contents import NOISY, is_noisy
from llama.bench.report.plots import pictures
from llama.bench.report.plots.canvas import PictureLook, as_png, as_svg, heading, laid_out, mark_noisy
from llama.bench.schema import Report

__all__ = ["PictureLook", "as_png", "as_svg", "figures", "heading"]

_WIDE = PictureLook()
_PAINTERS = {
    "time": pictures.draw_time,
    "memory": pictures.draw_memory,
    "steps": pictures.draw_steps,
    "speedup": pictures.draw_speedup,
    "kinds": pictures.draw_kinds,
}


def figures(report: Report, look: PictureLook = _WIDE) -> dict[str, Figure]:
    """Return the pictures that the report has figures for, by name, in reading order."""
    with matplotlib.rc_context(look.style()):
        found = {name: figure for name, draw in _PAINTERS.items() if (figure := draw(report, look)) is not None}
        for figure in found.values() if is_noisy(report) else ():
            mark_noisy(figure, look, NOISY)
        return {name: laid_out(figure) for name, figure in found.items()}
