//! The optional sections of a file.

/// A value for each optional section that there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerSection<T> {
    /// Of the masks section.
    pub masks: Option<T>,
    /// Of `tokenizer.json`.
    pub vocab: Option<T>,
    /// Of the sparse index. It refers to the masks.
    pub index: Option<T>,
}

/// The bytes of the optional sections, verbatim.
pub type Sections<'a> = PerSection<&'a [u8]>;

impl<T> Default for PerSection<T> {
    fn default() -> Self {
        PerSection::from([None, None, None])
    }
}

impl<T> From<[Option<T>; 3]> for PerSection<T> {
    /// In file order.
    fn from([masks, vocab, index]: [Option<T>; 3]) -> Self {
        PerSection { masks, vocab, index }
    }
}

impl<T> PerSection<T> {
    /// The sections' names, in file order.
    pub(super) const NAMES: [&'static str; 3] = ["masks", "vocab", "index"];

    /// The values, in file order.
    pub(super) fn in_order(&self) -> [Option<&T>; 3] {
        [self.masks.as_ref(), self.vocab.as_ref(), self.index.as_ref()]
    }

    pub(super) fn map<'s, U>(&'s self, change: impl Fn(&'s T) -> U) -> PerSection<U> {
        self.in_order().map(|value| value.map(&change)).into()
    }
}

impl Sections<'_> {
    /// Bytes of all sections.
    pub(super) fn len(&self) -> u64 {
        self.in_order()
            .into_iter()
            .flatten()
            .map(|bytes| bytes.len() as u64)
            .sum()
    }
}
