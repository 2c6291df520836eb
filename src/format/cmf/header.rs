//! The JSON header: network, conversation settings, provenance, skills (section 2 of the format).

use super::sections::PerSection;
use crate::error::{Result, bail};
use crate::format::arch::Arch;
use crate::format::bytes::hex_u64;
use crate::format::json::{kind_of, without_nulls};
use serde::Deserialize;
use serde_json::{Map, Value};

/// The validated header. Unknown members are ignored.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// The network.
    pub arch: Arch,
    /// Conversation settings.
    pub tokenizer_config: TokenizerConfig,
    /// The writer's name for its quantisation. Often misleading; the directory has the actual types.
    pub quant_type: Option<String>,
    /// The file's origin, free-form; `Null` if absent.
    pub provenance: Value,
    /// The file's number within a model of several files.
    pub shard: Option<Shard>,
    /// The records of skills, without members that are `null`.
    pub skills: Vec<Value>,
    /// hash64 of the optional sections that have one here.
    pub section_hashes: PerSection<u64>,
}

/// Conversation settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct TokenizerConfig {
    /// The chat template, in Jinja; absent: ChatML.
    pub chat_template: Option<String>,
    /// Ids that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// The id at the start of a text.
    pub bos_token_id: Option<u32>,
    /// The id that pads batches.
    pub pad_token_id: Option<u32>,
}

/// The number of a file within a model of several files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Shard {
    /// The file's number, from 1.
    pub no: u32,
    /// The number of files.
    pub count: u32,
}

impl Header {
    /// Types and validates a parsed header. Errors: `Parse`, with the member; `UnsupportedVersion`.
    pub fn from_json(json: &Map<String, Value>) -> Result<Header> {
        let member = |key: &str| json.get(key).filter(|value| !value.is_null());
        match member("format") {
            None => {}
            Some(Value::String(format)) if format == "cmf" => {}
            Some(other) => bail!(Parse, "header.format is {other}, expected \"cmf\""),
        }
        match member("version") {
            None => {}
            Some(version) if version.as_u64() == Some(2) => {}
            Some(other) => bail!(UnsupportedVersion, "header.version is {other}, expected 2"),
        }
        let arch = match member("arch") {
            Some(Value::Object(arch)) => Arch::from_json(arch)?,
            Some(other) => bail!(Parse, "header.arch: expected an object, found {}", kind_of(other)),
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
                "header.tokenizer_config.eos_token_ids has {id}, expected ids below vocab_size, {}",
                arch.vocab_size
            );
        }
        Ok(Header {
            tokenizer_config,
            quant_type: typed(member("quant_type"), "quant_type")?,
            provenance: member("provenance").cloned().unwrap_or_default(),
            shard: typed(member("shard"), "shard")?,
            skills: typed(member("skills"), "skills")?.unwrap_or_default(),
            section_hashes: section_hashes(member("section_hashes"))?,
            arch,
        })
    }

    /// Whether a skill record names a base model. Such a file holds a skill and cannot run.
    pub fn has_bound_skill(&self) -> bool {
        self.skills.iter().any(|skill| skill.get("base_dir_hash").is_some())
    }
}

fn section_hashes(json: Option<&Value>) -> Result<PerSection<u64>> {
    let map: Map<String, Value> = typed(json, "section_hashes")?.unwrap_or_default();
    let mut hashes = [None; 3];
    for (name, hash) in PerSection::<u64>::NAMES.into_iter().zip(&mut hashes) {
        let Some(value) = map.get(name) else { continue };
        // Hexadecimal text, because many JSON readers lose digits of 64-bit numbers.
        *hash = value.as_str().and_then(hex_u64);
        if hash.is_none() {
            bail!(Parse, "header.section_hashes.{name} is {value}, expected 16 hex digits");
        }
    }
    Ok(hashes.into())
}

fn typed<T: for<'de> Deserialize<'de>>(value: Option<&Value>, name: &str) -> Result<Option<T>> {
    let Some(value) = value else { return Ok(None) };
    match T::deserialize(without_nulls(value)) {
        Ok(typed) => Ok(Some(typed)),
        Err(err) => bail!(Parse, "header.{name}: {err}"),
    }
}
