//! A validated, memory-mapped model file.
