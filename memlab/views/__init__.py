"""What people see of a `Trace` or a `Comparison`: words, tables, pictures, pages, files.

Each takes values and measures nothing. A file imports only those before it: `colours`, `words`, `table`, `plots`,
`html`; `files` stands alone.
"""
