//! Choosing tokens and the control words: the sampler, the draft head's choice, and the ends of runs.

use super::{Bound, ctl_words, part};
use crate::error::{Result, bail};
use crate::kernel;
use crate::program::Ctl;
use crate::sampling::{self, Choice, SETTINGS_WORDS, choose};

impl Bound<'_> {
    fn store_ctl(&mut self, i: usize, ctl: &Ctl) -> Result<()> {
        let words = ctl_words(ctl);
        self.words_mut(i, 0, words.len())?.copy_from_slice(&words);
        Ok(())
    }

    pub(super) fn sample(&mut self, p: &kernel::Sample) -> Result<()> {
        let mut ctl = self.ctl(2)?;
        if ctl.stop != 0 {
            return Ok(());
        }
        let columns = ctl.columns as usize;
        if columns >= ctl.tokens.len() {
            bail!(
                Usage,
                "{columns} columns of logits, wanted at most {}",
                ctl.tokens.len() - 1
            );
        }
        (ctl.count, ctl.drafted) = (0, ctl.columns.saturating_sub(1));
        for column in 0..columns {
            let settings = part(self.words(0)?, 0, SETTINGS_WORDS, "settings")?;
            let logits = part(self.floats(1)?, column * p.stride as usize, p.vocab as usize, "logits")?;
            let seen = part(self.words(3)?, 0, p.vocab as usize, "seen")?;
            let counts = sampling::counts_tokens(settings);
            let Choice::Token(token) = choose(logits, settings, seen, ctl.pos + column as u32 + 1) else {
                ctl.stop = 2;
                break;
            };
            let drafted = std::mem::replace(&mut ctl.tokens[column + 1], token);
            ctl.count += 1;
            ctl.step += 1;
            if sampling::stops(settings).contains(&token) {
                ctl.stop = 1;
            }
            if counts {
                let seen = self.words_mut(3, token as usize, 1)?;
                seen[0] = seen[0].wrapping_add(1);
            }
            if ctl.stop != 0 || drafted != token {
                break;
            }
        }
        if ctl.count != 0 {
            ctl.tokens[0] = ctl.tokens[ctl.count as usize];
            ctl.pos += ctl.count;
            ctl.columns = 1;
        }
        self.store_ctl(2, &ctl)
    }

    pub(super) fn last_column(&mut self, p: &kernel::LastColumn) -> Result<()> {
        let mut ctl = self.ctl(2)?;
        let Some(earlier) = ctl.columns.checked_sub(1) else {
            return Ok(());
        };
        let len = p.vectors as usize * 4;
        let column = part(self.words(0)?, earlier as usize * len, len, "source")?.to_vec();
        self.words_mut(1, 0, len)?.copy_from_slice(&column);
        ctl.pos += earlier;
        ctl.columns = 1;
        self.store_ctl(2, &ctl)
    }

    pub(super) fn round_begin(&mut self, p: &kernel::RoundBegin) -> Result<()> {
        let (mut ctl, mut draft) = (self.ctl(0)?, self.ctl(1)?);
        let over = ctl.stop != 0 || ctl.pos >= ctl.last;
        draft.tokens[..8].copy_from_slice(&ctl.tokens[1..]);
        draft.pos = ctl.pos.saturating_sub(ctl.count);
        draft.columns = if over { 0 } else { ctl.count };
        draft.last = ctl.last;
        ctl.columns = if over { 0 } else { (p.depth + 1).min(ctl.last - ctl.pos) };
        self.store_ctl(0, &ctl)?;
        self.store_ctl(1, &draft)
    }

    pub(super) fn draft(&mut self, p: &kernel::Draft) -> Result<()> {
        let logits = part(self.floats(0)?, 0, p.vocab as usize, "logits")?;
        let mut best = (0, -3.4e38);
        for (token, &logit) in logits.iter().enumerate() {
            if logit > best.1 {
                best = (token as u32, logit);
            }
        }
        let (mut ctl, mut draft) = (self.ctl(1)?, self.ctl(2)?);
        if draft.columns == 0 {
            return Ok(());
        }
        let Some(to) = ctl.tokens.get_mut(p.number as usize) else {
            bail!(Usage, "draft number {}, wanted at most 8", p.number);
        };
        *to = best.0;
        draft.tokens[0] = best.0;
        draft.pos += 1;
        draft.columns = u32::from(draft.pos < draft.last);
        self.store_ctl(1, &ctl)?;
        self.store_ctl(2, &draft)
    }
}
