"""One vendor per file: translates to our types and our errors."""
