"""Pure arithmetic: from geometries and selections to spans of bytes."""
