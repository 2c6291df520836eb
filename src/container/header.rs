//! The JSON header: what a person or a tokenizer wants to know about the file (section 2 of the format).

use super::arch::Arch;
use super::json::{kind_of, without_nulls};
use crate::error::{Error, Kind, Result, bail};
use serde::Deserialize;
use serde_json::{Map, Value};

/// The header, typed and validated. Unknown members are ignored.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// The network.
    pub arch: Arch,
    /// How to talk to the model.
    pub tokenizer_config: TokenizerConfig,
    /// What the writer calls its quantisation. Often misleading: the directory is the truth.
    pub quant_type: Option<String>,
    /// Where the file comes from, free-form; `Null` when absent.
    pub provenance: Value,
    /// Which part of a split model this file is.
    pub shard: Option<Shard>,
    /// The registry of skills, without members that are `null`.
    pub skills: Vec<Value>,
    /// Checksums of the optional sections.
    pub section_hashes: SectionHashes,
}

/// How to talk to the model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct TokenizerConfig {
    /// A Jinja template; absent: ChatML.
    pub chat_template: Option<String>,
    /// Ids that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// The id that starts a text.
    pub bos_token_id: Option<u32>,
    /// The id that fills batches.
    pub pad_token_id: Option<u32>,
}

/// A part of a split model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Shard {
    /// Which part, from 1.
    pub no: u32,
    /// How many parts there are.
    pub count: u32,
}

/// hash64 of the optional sections, where the header has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the members are the sections' names")]
pub struct SectionHashes {
    pub masks: Option<u64>,
    pub vocab: Option<u64>,
    pub index: Option<u64>,
}

impl Header {
    /// The typed form of a parsed header. Errors: `Parse`, naming the member; `UnsupportedVersion`.
    pub fn from_json(json: &Map<String, Value>) -> Result<Header> {
        let member = |key: &str| json.get(key).filter(|value| !value.is_null());
        match member("format") {
            None => {}
            Some(Value::String(format)) if format == "cmf" => {}
            Some(other) => bail!(Parse, "header.format is {other}, wanted \"cmf\""),
        }
        match member("version") {
            None => {}
            Some(version) if version.as_u64() == Some(2) => {}
            Some(other) => bail!(UnsupportedVersion, "header.version is {other}, wanted 2"),
        }
        let arch = match member("arch") {
            Some(Value::Object(arch)) => Arch::from_json(arch)?,
            Some(other) => bail!(Parse, "header.arch: wanted an object, found {}", kind_of(other)),
            None => bail!(Parse, "header.arch is missing"),
        };
        let tokenizer_config: TokenizerConfig =
            typed(member("tokenizer_config"), "tokenizer_config")?.unwrap_or_default();
        if let Some(id) = tokenizer_config
            .eos_token_ids
            .iter()
            .find(|&&id| id as usize >= arch.vocab_size)
        {
            bail!(
                Parse,
                "header.tokenizer_config.eos_token_ids has {id}, wanted ids below vocab_size, {}",
                arch.vocab_size
            );
        }
        Ok(Header {
            tokenizer_config,
            quant_type: typed(member("quant_type"), "quant_type")?,
            provenance: member("provenance").cloned().unwrap_or_default(),
            shard: typed(member("shard"), "shard")?,
            skills: typed(member("skills"), "skills")?.unwrap_or_default(),
            section_hashes: SectionHashes::from_json(member("section_hashes"))?,
            arch,
        })
    }

    /// Whether a skill of the registry is bound to a base model, which makes the file one that is never run.
    pub fn has_bound_skill(&self) -> bool {
        self.skills.iter().any(|skill| skill.get("base_dir_hash").is_some())
    }
}

impl SectionHashes {
    fn from_json(json: Option<&Value>) -> Result<SectionHashes> {
        let map: Map<String, Value> = typed(json, "section_hashes")?.unwrap_or_default();
        let hash = |name: &str| match map.get(name) {
            None => Ok(None),
            // Hexadecimal text, because a JSON number of 64 bits loses digits in many readers.
            Some(Value::String(hex)) if !hex.starts_with('+') && hex.len() <= 16 => {
                u64::from_str_radix(hex, 16).map(Some).map_err(|_| {
                    Error::new(
                        Kind::Parse,
                        format!("header.section_hashes.{name} is '{hex}', wanted 16 hex digits"),
                    )
                })
            }
            Some(other) => bail!(Parse, "header.section_hashes.{name} is {other}, wanted 16 hex digits"),
        };
        Ok(SectionHashes {
            masks: hash("masks")?,
            vocab: hash("vocab")?,
            index: hash("index")?,
        })
    }
}

fn typed<T: for<'de> Deserialize<'de>>(value: Option<&Value>, name: &str) -> Result<Option<T>> {
    let Some(value) = value else { return Ok(None) };
    match T::deserialize(without_nulls(value)) {
        Ok(typed) => Ok(Some(typed)),
        Err(err) => bail!(Parse, "header.{name}: {err}"),
    }
}
