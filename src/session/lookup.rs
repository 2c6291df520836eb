//! Drafts without a model: what followed the last time the conversation had the same few tokens (prompt lookup).

use std::ops::RangeInclusive;

/// Tokens that must agree, the most first.
const MATCHES: RangeInclusive<usize> = 2..=4;

/// Up to `most` tokens that followed the latest earlier occurrence of the history's last tokens: of as many of them as
/// possible. Empty when they did not occur before.
pub(super) fn drafts(history: &[u32], most: usize) -> &[u32] {
    for length in MATCHES.rev() {
        let Some(known) = history.len().checked_sub(length) else {
            continue;
        };
        let wanted = &history[known..];
        // An occurrence that ends before the history does, so that something follows it.
        let found = history[..history.len() - 1]
            .windows(length)
            .rposition(|window| window == wanted);
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
        // Three tokens that agree say more than two.
        assert_eq!(drafts(&[5, 1, 2, 3, 1, 2, 4, 5, 1, 2], 1), [3]);
        // A run of one token continues itself.
        assert_eq!(drafts(&[7, 7, 7], 4), [7]);
    }

    #[test]
    fn nothing_known_is_nothing_drafted() {
        for history in [&[][..], &[1], &[1, 1], &[1, 2], &[1, 2, 3, 4], &[1, 2, 1]] {
            assert_eq!(drafts(history, 7), [] as [u32; 0], "{history:?}");
        }
    }
}
