//! Drafts without a model: the tokens that followed the same few tokens earlier in the conversation (prompt lookup).

use std::ops::RangeInclusive;

/// How many tokens must match. Longer matches are preferred.
const MATCHES: RangeInclusive<usize> = 2..=4;

/// Up to `most` tokens that followed the latest earlier occurrence of the history's end. Empty if it did not occur.
pub(super) fn drafts(history: &[u32], most: usize) -> &[u32] {
    for length in MATCHES.rev() {
        let Some(start) = history.len().checked_sub(length) else {
            continue;
        };
        let end = &history[start..];
        // The occurrence must end before the history does, so that a token follows it.
        let found = history[..history.len() - 1]
            .windows(length)
            .rposition(|window| window == end);
        if let Some(at) = found {
            let next = at + length;
            return &history[next..history.len().min(next + most)];
        }
    }
    &[]
}

#[cfg(test)]
mod tests {
    use super::drafts;

    #[test]
    fn the_longest_and_latest_match_is_continued() {
        assert_eq!(drafts(&[1, 2, 3, 9, 1, 2], 3), [3, 9, 1]);
        assert_eq!(drafts(&[1, 2, 3, 9, 1, 2], 1), [3]);
        // The latest of two.
        assert_eq!(drafts(&[1, 2, 3, 1, 2, 4, 1, 2], 1), [4]);
        // A match of three tokens is preferred to a later one of two.
        assert_eq!(drafts(&[5, 1, 2, 3, 1, 2, 4, 5, 1, 2], 1), [3]);
        // A run of one token continues itself.
        assert_eq!(drafts(&[7, 7, 7], 4), [7]);
    }

    #[test]
    fn nothing_is_drafted_without_a_match() {
        for history in [&[][..], &[1], &[1, 1], &[1, 2], &[1, 2, 3, 4], &[1, 2, 1]] {
            assert_eq!(drafts(history, 7), [] as [u32; 0], "{history:?}");
        }
    }
}
