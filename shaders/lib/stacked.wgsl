// Which of up to three stacked tensors a row of a weight belongs to: 0, 1 or 2.
// Needs: params.second_row, .third_row.
fn tensor_of(row: u32) -> u32 { return u32(row >= params.second_row) + u32(row >= params.third_row); }
