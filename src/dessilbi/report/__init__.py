"""See the path: one page a run, figures for papers, filters as images.

    from dessilbi.report import build_page, build_figures

    build_page(["runs/vgg16"], "vgg16.html")         # self-contained: opens from disk, asks nothing of the network
    build_figures(["runs/vgg16"], "figures")         # the same as SVG and PDF; needs matplotlib

`contents` reads run folders, path files and comparisons into plain data; `packing` makes norms small; `page` puts data,
styles and scripts (`assets/`) into one HTML file; `figures` draws with matplotlib; `watch` serves the page while a run
trains.
"""

from dessilbi.report.figures import build_figures
from dessilbi.report.page import build_page

__all__ = ["build_figures", "build_page"]
