// The rows of an image that a run computes. src/op/frame.rs has the same words.
// Needs: `frame`.

// The first row that is computed, in the whole image.
fn first_row() -> u32 { return frame[0]; }

// Rows of the whole image.
fn image_height() -> u32 { return frame[1]; }

// The first row of the input that its buffer holds, in the whole input.
fn held_row() -> u32 { return frame[2]; }

// Rows that are computed.
fn frame_rows() -> u32 { return frame[3]; }
