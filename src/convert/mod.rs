//! From other people's files to a container: Hugging Face directories, GGUF files, and containers of another type.
//!
//! An importer describes its source as a `Model`: a header, and tensors as matrices that can be read row by row. What
//! happens then is the same for all: every tensor gets a type, is encoded from the map and written. Nothing is held in
//! memory but the tensor in hand. Nothing here knows a device.

mod arch;
mod bind;
mod bits;
mod experts;
mod family;
mod gguf;
mod hf;
mod loss;
mod matrix;
mod output;
mod plan;
mod requant;
mod rope;
mod tokenizer;

use crate::container::{Arch, Parts, Sections, Split, TensorSpec};
use crate::dtype::Dtype;
use crate::dtype::encode::{Settings, encode_with};
use crate::error::{Error, Kind, Result, bail};
use matrix::{Encoding, Matrix};
use output::Output;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::fs::File;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::Path;

pub use bits::RouterStats;
pub use loss::Group;

/// What to convert to.
///
/// Vectors and tensors of fewer than 32 elements are f16 whatever is asked for; see
/// [`storage_dtype`](crate::dtype::encode::storage_dtype) for shapes that a type cannot have.
#[derive(Clone, Debug)]
pub struct Options {
    /// The type of matrices. With one of fewer than 8 bits the embedding and the output projection are q8_2f, and with one of
    /// at most 8 the matrices of routers and gates, and the small ones of recurrent layers, are f16. With q4tp the first
    /// fifteenth of the layers and the last are vbit_ro with a mean of 5 bits.
    pub quant: Dtype,
    /// Types of single tensors by a glob over their names, in which `*` stands for any characters, dots too, and `?` for one.
    /// Of several that match the last counts.
    pub overrides: Vec<(String, Dtype)>,
    /// The mean bits of vbit, 3 to 8; `None` is what a profile says, else [`Settings::MEAN_BITS`], and leaves alone what the source has as vbit.
    pub mean_bits: Option<f64>,
    /// How much the experts are worth that share the bits of vbit.
    pub router_stats: Option<RouterStats>,
    /// Whether a source tensor that would be left out is an error.
    pub strict: bool,
}

impl Options {
    /// Matrices as `quant`, and defaults for the rest.
    pub fn new(quant: Dtype) -> Options {
        Options {
            quant,
            overrides: Vec::new(),
            mean_bits: None,
            router_stats: None,
            strict: false,
        }
    }
}

/// What a conversion did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Tensors written.
    pub tensors: usize,
    /// Bytes of the file.
    pub bytes: u64,
    /// Source tensors that nothing needs, by name, each with the reason.
    pub dropped: Vec<String>,
    /// What a person should know about the result.
    pub notes: Vec<String>,
    /// What was written, by role and type, in the order of the file.
    pub groups: Vec<Group>,
}

/// What is happening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A tensor was written.
    Tensor {
        /// How many are written now.
        done: usize,
        /// How many there are.
        total: usize,
        /// The one that was just written.
        name: &'a str,
    },
}

/// Converts the model at `src` to the container `out`, which is written under another name and renamed at the end.
/// `progress` may end it; then nothing is left behind.
///
/// `src` is a Hugging Face directory, a `.safetensors` file beside its `config.json`, a GGUF file (of a split one: any part) or a
/// container.
/// Errors: `UnsupportedModel` names the architecture or the configuration key that cannot be honoured,
/// `UnsupportedTensorType` the type that cannot be read and the tensor whose values its type cannot hold, `MissingTensor` what the
/// network needs and the source lacks (with [`Options::strict`] also `UnsupportedModel` for what it has besides); `Usage` when `out` is an input, an override matches nothing, or bits are asked for that no
/// tensor has; `Io`, `Parse`, `Bounds` `HashMismatch` and the container's own for files that are no good.
pub fn convert(
    src: &Path,
    out: &Path,
    options: &Options,
    progress: &mut dyn FnMut(Event) -> ControlFlow<()>,
) -> Result<Report> {
    convert_to(src, Target::One(out), options, progress).map(|(report, _)| report)
}

/// Where a converted model goes.
pub enum Target<'a> {
    /// One file.
    One(&'a Path),
    /// Several; what is read is added to their inputs.
    Several(Split),
}

/// Converts as [`convert`] does, to one file or to several. Returns the files as well.
///
/// Errors: those of [`convert`], and of [`SplitWriter`](crate::container::SplitWriter).
pub fn convert_to(
    src: &Path,
    target: Target,
    options: &Options,
    progress: &mut dyn FnMut(Event) -> ControlFlow<()>,
) -> Result<(Report, Parts)> {
    match kind_of(src)? {
        SourceKind::HuggingFace => {
            let source = hf::Source::open(src)?;
            let target = target.keeping(source.files())?;
            write(source.model()?, src, target, options, progress)
        }
        SourceKind::Gguf => {
            let source = gguf::Source::open(src)?;
            let target = target.keeping(source.files())?;
            write(source.model()?, src, target, options, progress)
        }
        SourceKind::Container => {
            let source = requant::Source::open(src)?;
            let target = target.keeping(source.files())?;
            write(source.model()?, src, target, options, progress)
        }
    }
}

enum SourceKind {
    HuggingFace,
    Gguf,
    Container,
}

/// Looks at the first bytes of a file; a name is believed only where a format has no magic number.
fn kind_of(src: &Path) -> Result<SourceKind> {
    let meta = std::fs::metadata(src).map_err(|err| Error::io(src, &err))?;
    if meta.is_dir() {
        return Ok(SourceKind::HuggingFace);
    }
    let shown = src.display();
    if !meta.is_file() {
        bail!(Io, "{shown}: wanted a file or a directory, found a special file");
    }
    let mut start = Vec::new();
    let file = File::open(src).map_err(|err| Error::io(src, &err))?;
    file.take(8)
        .read_to_end(&mut start)
        .map_err(|err| Error::io(src, &err))?;
    if start.starts_with(&crate::container::gguf::MAGIC) {
        return Ok(SourceKind::Gguf);
    }
    if start.starts_with(b"CMF") {
        return Ok(SourceKind::Container);
    }
    if src
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("safetensors"))
    {
        return Ok(SourceKind::HuggingFace);
    }
    if start.starts_with(b"PK\x03\x04") || start.starts_with(b"\x80\x02") {
        bail!(
            InvalidMagic,
            "{shown}: pickled weights are never read, convert them to safetensors"
        );
    }
    bail!(
        InvalidMagic,
        "{shown}: wanted a directory, a .safetensors, a GGUF or a CMF file, found bytes {start:02x?}"
    );
}

/// One tensor on its way: the container's name and where the values are.
struct Tensor<'a> {
    name: String,
    data: Matrix<'a>,
}

/// A source, described.
struct Model<'a> {
    header: Map<String, Value>,
    /// `tokenizer.json`.
    vocab: Option<Cow<'a, [u8]>>,
    masks: Option<Masks<'a>>,
    tensors: Vec<Tensor<'a>>,
    dropped: Vec<String>,
    notes: Vec<String>,
}

/// The masks section of a source.
struct Masks<'a> {
    bytes: &'a [u8],
    /// Whether it has rows for every pass of a looped network.
    by_pass: bool,
}

/// What an importer found out about a model that was trained elsewhere.
struct Import<'a> {
    arch: Arch,
    tokenizer_config: Map<String, Value>,
    provenance: Map<String, Value>,
    vocab: Option<Vec<u8>>,
    bound: bind::Bound<'a>,
}

impl<'a> Import<'a> {
    /// Errors: `Tokenizer` for ids that the embedding does not have.
    fn model(self) -> Result<Model<'a>> {
        let Import {
            arch,
            mut tokenizer_config,
            provenance,
            vocab,
            bound,
        } = self;
        let bind::Bound {
            tensors,
            dropped,
            mut notes,
        } = bound;
        let known = |id: &Value| id.as_u64().is_some_and(|id| id < arch.vocab_size as u64);
        let eos = tokenizer_config.get("eos_token_ids").and_then(Value::as_array);
        let stops = eos.into_iter().flatten().chain(tokenizer_config.get("bos_token_id"));
        if let Some(id) = stops.into_iter().find(|id| !known(id)) {
            bail!(
                Tokenizer,
                "token id {id} starts or ends texts, but the vocabulary has {} entries",
                arch.vocab_size
            );
        }
        if let Some(id) = tokenizer_config.get("pad_token_id").filter(|id| !known(id)).cloned() {
            tokenizer_config.remove("pad_token_id");
            notes.push(format!(
                "padding token {id} is left out: the vocabulary has {} entries",
                arch.vocab_size
            ));
        }
        let arch = serde_json::to_value(&arch)
            .map_err(|err| Error::new(Kind::Parse, format!("the network's description is no JSON: {err}")))?;
        let header = [
            ("arch", arch),
            ("provenance", provenance.into()),
            ("tokenizer_config", tokenizer_config.into()),
        ];
        let header = header.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        Ok(Model {
            header,
            vocab: vocab.map(Cow::Owned),
            masks: None,
            tensors,
            dropped,
            notes,
        })
    }
}

fn write(
    model: Model,
    src: &Path,
    target: Target,
    options: &Options,
    progress: &mut dyn FnMut(Event) -> ControlFlow<()>,
) -> Result<(Report, Parts)> {
    let Model {
        mut header,
        vocab,
        masks,
        tensors,
        dropped,
        mut notes,
    } = model;
    if options.strict
        && let Some(first) = dropped.first()
    {
        bail!(
            UnsupportedModel,
            "{} of the source's tensors would be left out, and none may be; the first is {first}",
            dropped.len()
        );
    }
    let tensors = plan::order(tensors);
    let (dtypes, chosen) = plan::dtypes(&tensors, options)?;
    notes.extend(chosen);
    if !dtypes.iter().any(|&dtype| bits::is_vbit(dtype)) {
        if let Some(mean) = options.mean_bits {
            bail!(Usage, "a mean of {mean} bits is asked for, and no tensor is to be vbit");
        }
        if options.router_stats.is_some() {
            bail!(
                Usage,
                "router statistics are for the bits of vbit, and no tensor is to be vbit"
            );
        }
    }
    if let Some(stats) = &options.router_stats {
        stats.check(&tensors)?;
    }
    header.insert("quant_type".into(), options.quant.name().to_uppercase().into());
    let mut provenance = match header.remove("provenance") {
        Some(Value::Object(provenance)) => provenance,
        None | Some(Value::Null) => Map::new(),
        Some(other) => Map::from_iter([("source_provenance".to_owned(), other)]),
    };
    let name = src.file_name().map(|name| name.to_string_lossy().into_owned());
    provenance.insert(
        "tool".into(),
        concat!("cmf-gpu ", env!("CARGO_PKG_VERSION"), " convert").into(),
    );
    provenance.insert("source_model".into(), name.into());
    let quant = match options.quant.quant_name() {
        "" => options.quant.name(),
        name => name,
    };
    provenance.insert("weight_quant".into(), quant.into());
    header.insert("provenance".into(), provenance.into());
    let spec = |(tensor, &dtype): (&Tensor, &Dtype)| TensorSpec {
        name: tensor.name.clone(),
        dtype,
        shape: tensor.data.shape.clone(),
    };
    let specs: Vec<TensorSpec> = tensors.iter().zip(&dtypes).map(spec).collect();
    let sections = Sections {
        vocab: vocab.as_deref(),
        masks: masks.as_ref().map(|masks| masks.bytes),
        index: None,
    };
    let by_pass = masks.is_some_and(|masks| masks.by_pass);
    let mut writer = Output::create(target, header, specs, sections, by_pass)?;
    let mut groups = Vec::new();
    let mut bits = bits::Bits::default();
    for (index, (tensor, &dtype)) in tensors.iter().zip(&dtypes).enumerate() {
        let name = tensor.name.as_str();
        let named = |err: Error| err.context(format!("tensor '{name}'"));
        tensor.data.intact().map_err(named)?;
        let again = bits::is_vbit(dtype) && (options.mean_bits.is_some() || options.router_stats.is_some());
        match tensor.data.stored_as(dtype).filter(|_| !again) {
            Some(payload) => {
                writer.write(payload)?;
                loss::add(&mut groups, tensor, dtype, payload, None).map_err(named)?;
            }
            None => {
                let widths = bits.of(index, &tensors, &dtypes, options)?;
                let settings = Settings {
                    widths: widths.as_deref(),
                    ..Settings::default()
                };
                let (rows, cols) = tensor.data.rows_cols();
                let reader = tensor.data.reader().map_err(named)?;
                let payload = encode_with(dtype, rows, cols, &settings, &*reader).map_err(named)?;
                writer.write(&payload)?;
                loss::add(&mut groups, tensor, dtype, &payload, Some(&reader)).map_err(named)?;
            }
        }
        tensor.data.release();
        let event = Event::Tensor {
            done: index + 1,
            total: tensors.len(),
            name,
        };
        if progress(event).is_break() {
            bail!(Interrupted, "the conversion was cancelled");
        }
    }
    let parts = writer.finish()?;
    let report = Report {
        tensors: tensors.len(),
        bytes: parts.bytes,
        dropped,
        notes,
        groups,
    };
    Ok((report, parts))
}
