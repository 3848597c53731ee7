"""How a lesson becomes slides: one for each heading, and its cells below it (nbconvert)."""

from nbconvert.preprocessors import Preprocessor

c = get_config()


class Slides(Preprocessor):
    def preprocess_cell(self, cell, resources, index):
        is_heading = cell.cell_type == "markdown" and cell.source.startswith("#")
        kind = "slide" if is_heading else "subslide" if cell.cell_type == "code" else "-"
        cell.metadata["slideshow"] = {"slide_type": kind}
        return cell, resources


c.SlidesExporter.preprocessors = [Slides]
c.SlidesExporter.reveal_scroll = True
