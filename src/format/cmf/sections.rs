//! The optional sections of a file, as bytes.

/// The optional sections, verbatim.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sections<'a> {
    /// `tokenizer.json`.
    pub vocab: Option<&'a [u8]>,
    /// The masks section.
    pub masks: Option<&'a [u8]>,
    /// The sparse index. It refers to the masks.
    pub index: Option<&'a [u8]>,
}

impl<'a> Sections<'a> {
    /// In file order.
    pub(super) fn in_order(&self) -> [Option<&'a [u8]>; 3] {
        [self.masks, self.vocab, self.index]
    }

    /// Bytes of all sections.
    pub(super) fn len(&self) -> u64 {
        self.in_order()
            .into_iter()
            .flatten()
            .map(|bytes| bytes.len() as u64)
            .sum()
    }
}

/// Copies of the sections, kept until a file is complete.
#[derive(Clone, Default)]
pub(super) struct OwnedSections {
    vocab: Option<Vec<u8>>,
    masks: Option<Vec<u8>>,
    index: Option<Vec<u8>>,
}

impl OwnedSections {
    pub fn of(sections: Sections) -> OwnedSections {
        OwnedSections {
            vocab: sections.vocab.map(<[u8]>::to_vec),
            masks: sections.masks.map(<[u8]>::to_vec),
            index: sections.index.map(<[u8]>::to_vec),
        }
    }

    pub fn borrowed(&self) -> Sections<'_> {
        Sections {
            vocab: self.vocab.as_deref(),
            masks: self.masks.as_deref(),
            index: self.index.as_deref(),
        }
    }
}
