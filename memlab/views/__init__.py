"""What people see of a `Trace`, a `Comparison` or a `Difference`: words, tables, pictures, pages.

Each takes values and measures nothing. From the ground up: `colours`, `words`, `verdicts`, `table`; `canvas`, to draw
on; the figures (`plots`, `fit`, `modules`, `blocks`, `network`, `reasons_saved`, `saved`, `difference`, `schedule`), of
which `figures` chooses one; `html` and `report`, the pages.
"""
