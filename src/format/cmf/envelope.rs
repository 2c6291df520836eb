//! The envelope, the first 128 bytes of a file: magic, version, features and section positions (section 1 of the format).
//!
//! The field `flags` is reserved and ignored: a feature bit marks everything that changes the meaning of a file. Bytes
//! outside all sections are allowed, because appending leaves such bytes.

use super::sections::PerSection;
use crate::error::{Result, bail};
use crate::format::bytes;

/// Bytes of the envelope.
pub(super) const LEN: u64 = 128;
/// The alignment of the weight blob.
pub(super) const BLOB_ALIGN: u64 = 4096;

const MAGIC: [u8; 4] = *b"CMF\x01";
const VERSION: u32 = 2;

pub(super) const TENSOR_DIR: u32 = 1 << 0;
pub(super) const BINARY_MASKS: u32 = 1 << 1;
pub(super) const QUANT_2F: u32 = 1 << 2;
pub(super) const LOOP_MASKS: u32 = 1 << 5;
pub(super) const SKILL_FILE: u32 = 1 << 6;
pub(super) const PRISM_HADAMARD: u32 = 1 << 7;
const KNOWN: u32 = TENSOR_DIR | BINARY_MASKS | QUANT_2F | LOOP_MASKS | SKILL_FILE | PRISM_HADAMARD;

/// Names of feature bits, from bit 0: those of the format, and those of newer writers.
const FEATURE_NAMES: [&str; 16] = [
    "TENSOR_DIR",
    "BINARY_MASKS",
    "QUANT_2F",
    "DELTA_MASKS",
    "HOT_PACKS",
    "LOOP_MASKS",
    "SKILL_FILE",
    "PRISM_HADAMARD",
    "PRISM_AFFINE",
    "SKILLS_V2",
    "ROUTER_V2",
    "DECISION",
    "BOUNDED_STATE",
    "GENOME",
    "unknown",
    "BLOCK_DIFFUSION",
];

/// A section: offset and length in bytes, from the start of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Span {
    pub off: u64,
    pub len: u64,
}

impl Span {
    /// The section's bytes in `file`, against which the span was checked.
    pub fn of<'a>(&self, file: &'a [u8]) -> &'a [u8] {
        // An empty weight blob may start past the end of the file.
        file.get(self.off as usize..)
            .and_then(|rest| rest.get(..self.len as usize))
            .unwrap_or_default()
    }
}

/// The envelope's fields, checked against the length of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Envelope {
    pub features: u32,
    pub header: Span,
    pub directory: Span,
    pub data: Span,
    pub sections: PerSection<Span>,
    pub header_hash: Option<u64>,
    pub directory_hash: Option<u64>,
}

impl Envelope {
    /// Reads the envelope of a whole file.
    ///
    /// Errors: `InvalidMagic`, `UnsupportedVersion`, `UnsupportedFeature`; `Bounds` for a section outside the file or a
    /// misaligned blob; `Parse` for feature bits that contradict the sections.
    pub fn parse(file: &[u8]) -> Result<Envelope> {
        let magic = &file[..file.len().min(MAGIC.len())];
        if !MAGIC.starts_with(magic) {
            bail!(
                InvalidMagic,
                "not a CMF file: expected magic {MAGIC:02X?}, found {magic:02X?}{}",
                hint(file)
            );
        }
        let Some(head) = file.first_chunk::<{ LEN as usize }>() else {
            bail!(Bounds, "the envelope needs {LEN} bytes, the file has {}", file.len());
        };
        let u32_at = |at| bytes::u32_at(head, at).unwrap_or(0);
        let u64_at = |at| bytes::u64_at(head, at).unwrap_or(0);
        let version = u32_at(0x04);
        if version != VERSION {
            bail!(
                UnsupportedVersion,
                "container version {version}, this program reads version {VERSION}"
            );
        }
        let features = u32_at(0x0C);
        if features & !KNOWN != 0 {
            bail!(UnsupportedFeature, "the file requires {}", names(features & !KNOWN));
        }
        if features & TENSOR_DIR == 0 {
            bail!(
                UnsupportedFeature,
                "feature bit 0 (TENSOR_DIR) is clear, but every file of version {VERSION} sets it"
            );
        }
        let span = |at: usize| Span {
            off: u64_at(at),
            len: u64_at(at + 8),
        };
        let file_len = file.len() as u64;
        let section = |at: usize, name: &str| {
            let span = span(at);
            match span.off.checked_add(span.len) {
                Some(end) if end <= file_len && span.off >= LEN => Ok(span),
                _ => bail!(
                    Bounds,
                    "{name} section at {:#x} with {} bytes, allowed is {LEN:#x} to the file's end at {file_len:#x}",
                    span.off,
                    span.len
                ),
            }
        };
        let optional = |at: usize, name: &str| match span(at) {
            Span { off: 0, .. } => Ok(None),
            Span { off, len: 0 } => bail!(Parse, "{name} section at {off:#x} is empty"),
            _ => section(at, name).map(Some),
        };
        let data = span(0x30);
        if data.off % BLOB_ALIGN != 0 {
            bail!(
                Bounds,
                "weight blob at {:#x}, expected a multiple of {BLOB_ALIGN}",
                data.off
            );
        }
        let hash = |at: usize| Some(u64_at(at)).filter(|&hash| hash != 0);
        let envelope = Envelope {
            features,
            header: section(0x10, "header")?,
            directory: section(0x20, "directory")?,
            data: if data.len == 0 {
                data
            } else {
                section(0x30, "weight blob")?
            },
            sections: PerSection {
                masks: optional(0x40, "masks")?,
                vocab: optional(0x50, "vocab")?,
                index: optional(0x60, "index")?,
            },
            header_hash: hash(0x70),
            directory_hash: hash(0x78),
        };
        envelope.check_features()?;
        Ok(envelope)
    }

    fn check_features(&self) -> Result<()> {
        let has = |bit| self.features & bit != 0;
        match &self.sections.masks {
            Some(span) if !has(BINARY_MASKS) => {
                bail!(
                    Parse,
                    "masks section at {:#x}, but feature bit 1 (BINARY_MASKS) is clear",
                    span.off
                )
            }
            None if has(BINARY_MASKS) => bail!(Parse, "feature bit 1 (BINARY_MASKS) without a masks section"),
            None if has(LOOP_MASKS) => bail!(Parse, "feature bit 5 (LOOP_MASKS) without a masks section"),
            _ => Ok(()),
        }
    }

    /// The 128 bytes that [`Envelope::parse`] reads back.
    pub fn to_bytes(&self) -> [u8; LEN as usize] {
        let mut head = [0; LEN as usize];
        let mut put = |at: usize, bytes: &[u8]| head[at..at + bytes.len()].copy_from_slice(bytes);
        put(0x00, &MAGIC);
        put(0x04, &VERSION.to_le_bytes());
        put(0x0C, &self.features.to_le_bytes());
        let absent = Span::default();
        let optional = self.sections.in_order().map(|span| span.unwrap_or(&absent));
        let spans = [&self.header, &self.directory, &self.data].into_iter().chain(optional);
        for (i, span) in spans.enumerate() {
            put(0x10 + 16 * i, &span.off.to_le_bytes());
            put(0x18 + 16 * i, &span.len.to_le_bytes());
        }
        put(0x70, &self.header_hash.unwrap_or(0).to_le_bytes());
        put(0x78, &self.directory_hash.unwrap_or(0).to_le_bytes());
        head
    }
}

fn names(features: u32) -> String {
    let bits = (0..32).filter(|bit| features >> bit & 1 == 1);
    let name = |bit: usize| format!("feature bit {bit} ({})", FEATURE_NAMES.get(bit).unwrap_or(&"unknown"));
    let list: Vec<String> = bits.map(name).collect();
    format!("{}, which this program does not support", list.join(", "))
}

/// A guess at the format of a file that is not CMF, for the error text.
fn hint(file: &[u8]) -> String {
    const WEB_PAGE: &str = "a web page; the download failed";
    const HINTS: [(&[u8], &str); 13] = [
        (b"GGUF", "a GGUF model"),
        (b"NINFER", "a .ninfer model"),
        (
            b"version https://git-lfs",
            "a git-lfs pointer; the file itself was not downloaded",
        ),
        (b"<!DO", WEB_PAGE),
        (b"<!do", WEB_PAGE),
        (b"<htm", WEB_PAGE),
        (b"<HTM", WEB_PAGE),
        (b"\x1F\x8B", "a gzip-compressed file; unpack it first"),
        (b"PK\x03\x04", "a zip archive; unpack it first"),
        (b"\x28\xB5\x2F\xFD", "a zstd-compressed file; unpack it first"),
        (b"\xFD7zXZ", "an xz-compressed file; unpack it first"),
        (b"{", "a JSON file"),
        (b"CMF", "a CMF file of another generation"),
    ];
    let looks_like = match HINTS.iter().find(|(start, _)| file.starts_with(start)) {
        Some((_, text)) => text,
        None if file.get(8) == Some(&b'{') => "a safetensors file; convert the model first",
        None => return String::new(),
    };
    format!("; this looks like {looks_like}")
}
