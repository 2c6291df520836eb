// The groups of 32 columns that a row's sum covers: those that `list` names. In the matvec family, logical lane l takes
// entries l, l + 32, ... of the list; in the matmul family a thread takes all in order. So the sum has the bits of the
// sum of a matrix without the other groups. Overlays are not skipped: the caller sets x to zero in the groups that are
// left out.
// list: number of blocks to compute, number of groups to sum, word at which the blocks begin, 0;
//   all groups, those to sum first;
//   all blocks of 4 rows, those to compute first.
// Needs: `list`.
const LOOKS_UP_GROUPS: bool = true;

fn group_count() -> u32 { return list[1]; }

fn group_at(entry: u32) -> u32 { return list[LIST_HEADER + entry]; }
