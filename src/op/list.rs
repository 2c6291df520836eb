//! The lists that masked kernels read: four words of counts, then the entries to compute, then those that are left out.

use super::constants::LIST_HEADER;

/// The numbers below `count`, those to compute first; and the number of those.
fn computed_first(count: usize, computed: &dyn Fn(usize) -> bool) -> (Vec<u32>, u32) {
    let (mut all, left_out): (Vec<usize>, Vec<usize>) = (0..count).partition(|&number| computed(number));
    let computed = all.len() as u32;
    all.extend(left_out);
    (all.into_iter().map(|number| number as u32).collect(), computed)
}

/// A list of blocks of 4 rows and of groups of 32 columns, as `shaders/lib/groups_masked.wgsl` describes it.
pub fn blocks_list(
    (blocks, block): (usize, &dyn Fn(usize) -> bool),
    (groups, group): (usize, &dyn Fn(usize) -> bool),
) -> Vec<u32> {
    let (blocks, block_count) = computed_first(blocks, block);
    let (groups, group_count) = computed_first(groups, group);
    let head = [block_count, group_count, LIST_HEADER + groups.len() as u32, 0];
    [&head, &groups[..], &blocks[..]].concat()
}

/// A list of outputs, as `shaders/op/matvec_glu.wgsl` describes it.
pub fn outputs_list(outputs: usize, computed: &dyn Fn(usize) -> bool) -> Vec<u32> {
    let (outputs, count) = computed_first(outputs, computed);
    [&[count, 0, 0, 0], &outputs[..]].concat()
}

/// A list of query heads, as `shaders/op/attn_block.wgsl` describes it. It has [`heads_list_len`] words.
pub fn heads_list(heads: usize, kv_heads: usize, computed: &dyn Fn(usize) -> bool) -> Vec<u32> {
    let (all, count) = computed_first(heads, computed);
    let shared_by = heads.checked_div(kv_heads).unwrap_or(0).max(1) as u32;
    // For each key-value head that is read: its index, its first entry among the query heads, and the number of its
    // entries.
    let mut read: Vec<[u32; 3]> = Vec::new();
    for (entry, head) in all.iter().take(count as usize).enumerate() {
        match read.last_mut().filter(|last| last[0] == head / shared_by) {
            Some(last) => last[2] += 1,
            None => read.push([head / shared_by, entry as u32, 1]),
        }
    }
    let mut words = [&[count, read.len() as u32, 0, 0], &all[..], read.as_flattened()].concat();
    words.resize(heads_list_len(heads, kv_heads), 0);
    words
}

/// Words of a list of query heads.
pub fn heads_list_len(heads: usize, kv_heads: usize) -> usize {
    LIST_HEADER as usize + heads + 3 * kv_heads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_come_first_and_left_out_entries_last() {
        let odd = |number: usize| number % 2 == 1;
        assert_eq!(outputs_list(4, &odd), [2, 0, 0, 0, 1, 3, 0, 2]);
        // Three groups, of which two are summed, then two blocks.
        let list = blocks_list((2, &|_| true), (3, &|group| group != 0));
        assert_eq!(list, [2, 2, 7, 0, 1, 2, 0, 0, 1]);
    }

    #[test]
    fn heads_name_the_key_value_heads_that_they_read() {
        // Query heads 0 and 1 read key-value head 0; 4 and 5 read 2.
        let computed = |head: usize| [1, 4, 5].contains(&head);
        let list = heads_list(6, 3, &computed);
        assert_eq!(list, [3, 2, 0, 0, 1, 4, 5, 0, 2, 3, 0, 0, 1, 2, 1, 2, 0, 0, 0]);
        assert_eq!(list.len(), heads_list_len(6, 3));
    }
}
