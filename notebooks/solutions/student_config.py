"""How ``make student`` turns these notebooks into those one folder up (nbconvert and nbgrader)."""

c = get_config()
c.NotebookExporter.preprocessors = ["nbgrader.preprocessors.ClearSolutions"]
c.ClearSolutions.code_stub = {"python": "..."}
c.ClearOutputPreprocessor.enabled = True
