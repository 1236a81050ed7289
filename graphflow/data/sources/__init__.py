"""Sources of rows: arrays in memory, files of tables, images, and what others wrote."""
