//! Flags that several commands share, and the parsing of their values.

use super::context::Context;
use super::convert::quant;
use super::model::{ModelArgs, hinted, open, require_language};
use super::output::{Output, size};
use super::overlay::{self, OverlayArgs};
use clap::Args;
use cmf_gpu::convert::{Options, quantised};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::engine::DeviceReport;
use cmf_gpu::options::{DeviceChoice, Kv, Speculation, TaskChoice};
use cmf_gpu::source::ModelSource;
use cmf_gpu::{Engine, Error, LoadOptions, Result};
use serde_json::{Value, json};
use std::path::Path;
use std::str::FromStr;

/// Which device computes, and with how much memory.
#[derive(Args)]
pub struct AdapterArgs {
    /// auto, gpu, cpu, software, an index in the list of devices, or a part of a name
    #[arg(long, env = "CMF_GPU_DEVICE", default_value = "auto", value_parser = parsed::<DeviceChoice>, hide_env_values = true)]
    device: DeviceChoice,
    /// Most device memory to use, in MiB
    #[arg(
        long,
        env = "CMF_GPU_VRAM_MB",
        value_name = "MIB",
        value_parser = whole::<u64>,
        allow_negative_numbers = true,
        hide_env_values = true
    )]
    vram_mb: Option<u64>,
    /// Compiles shaders with bounds checks, for debugging
    #[arg(long)]
    checked_shaders: bool,
}

/// Which device runs a language model, and with how much memory.
#[derive(Args)]
pub struct DeviceArgs {
    #[command(flatten)]
    adapter: AdapterArgs,
    /// Length of the context in tokens; 0 = the length the model was trained for [default: that, at most 4096]
    #[arg(
        short,
        long,
        visible_alias = "ctx-size",
        env = "CMF_GPU_CTX",
        value_parser = whole::<u32>,
        allow_negative_numbers = true,
        hide_env_values = true
    )]
    pub ctx: Option<u32>,
    /// Type of cached keys and values: f16 or f32
    #[arg(long, env = "CMF_GPU_KV", default_value = "f16", value_parser = kv, hide_env_values = true)]
    pub kv: Kv,
}

/// Which mask is active.
#[derive(Args)]
pub struct TaskArgs {
    /// The task whose mask is active, none = the full model [default: the task of the active skill, else the file's default
    /// task, if it has a mask]
    #[arg(long, value_name = "NAME", value_parser = parsed::<TaskChoice>)]
    task: Option<TaskChoice>,
}

impl TaskArgs {
    /// The choice; without the flag, the default.
    pub fn choice(&self) -> TaskChoice {
        self.task.clone().unwrap_or_default()
    }
}

/// The types in which a model is loaded.
#[derive(Args, Clone, Copy, Default)]
pub struct QuantArgs {
    /// Quantises the matrices of a Hugging Face directory or a GGUF file to this type while loading, as convert does [default:
    /// the types of the file]
    #[arg(long, value_parser = quant)]
    pub quant: Option<Dtype>,
}

/// Opens a model in these types. Errors: as [`source::open`] and [`quantised`]; for a missing file with a hint.
pub fn open_as(path: &Path, quant: QuantArgs) -> Result<ModelSource> {
    match quant.quant {
        Some(quant) => quantised(path, Options::new(quant)).map_err(|err| hinted(err, path)),
        None => open(path),
    }
}

/// The flags of every command that runs a model: model, device, mask and skills.
#[derive(Args)]
pub struct LoadArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub quant: QuantArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub task: TaskArgs,
    #[command(flatten)]
    pub overlay: OverlayArgs,
}

impl LoadArgs {
    /// Opens the model that is given. Errors: as [`open_as`]; `UnsupportedModel` for a pipeline.
    pub fn open(&self) -> Result<ModelSource> {
        let source = open_as(&self.model.path()?, self.quant)?;
        require_language(&source)?;
        Ok(source)
    }

    /// The library's options, with speculation off and without skills.
    pub fn options(&self) -> LoadOptions {
        self.device.options().task(self.task.choice())
    }
}

impl DeviceArgs {
    /// The library's options, with speculation off, and without masks and skills.
    pub fn options(&self) -> LoadOptions {
        let options = self.adapter.options().ctx(self.ctx).kv(self.kv);
        options.speculation(Speculation::Off)
    }
}

impl AdapterArgs {
    /// The library's options.
    pub fn options(&self) -> LoadOptions {
        LoadOptions::default()
            .device(self.device.clone())
            .vram_mb(self.vram_mb)
            .checked_shaders(self.checked_shaders)
    }
}

/// The value of an option. Errors: the message without its kind; the parser puts the flag in front of it.
pub fn parsed<T: FromStr<Err = Error>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|err: Error| err.message)
}

/// A whole number that is not negative. Errors: the range of numbers.
pub fn whole<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    whole_from(0, text)
}

/// A whole number above 0. Errors: the range of numbers.
pub fn positive<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    whole_from(1, text)
}

fn whole_from<T: TryFrom<u64>>(least: u64, text: &str) -> Result<T, String> {
    let number = text.parse::<u64>().ok().filter(|&number| number >= least);
    let most = u64::MAX >> (64 - 8 * size_of::<T>());
    let number = number.and_then(|number| T::try_from(number).ok());
    number.ok_or_else(|| format!("expected a whole number from {least} to {most}"))
}

fn kv(text: &str) -> Result<Kv, String> {
    match text {
        "f16" => Ok(Kv::F16),
        "f32" => Ok(Kv::F32),
        "q8" => Err("quantised caches are not implemented yet; use f16, or f32 for twice the memory".into()),
        _ => Err("expected f16 or f32".into()),
    }
}

/// Loads a model with a progress bar, and prints the device, the skills and the task. The first Ctrl-C cancels it.
pub fn load(source: ModelSource, options: &LoadOptions, context: &mut Context) -> Result<Engine> {
    context.out.notices(&source.notes);
    let engine = context.cancellable("loading", |progress| Engine::open(source, options, progress))?;
    announce(engine.device_report(), engine.load_s(), &context.out);
    overlay::announce(&engine, &context.out);
    if let Some(task) = engine.task() {
        context.out.note(format!("task {task}"));
    }
    Ok(engine)
}

/// Prints the notices of loading, the device and its memory.
pub fn announce(report: &DeviceReport, load_s: f64, out: &Output) {
    out.notices(&report.notices);
    out.note(format!(
        "{} ({}, {}): {} layers, {} weights, {} buffers, context {}, loaded in {:.2} s",
        report.name,
        report.backend,
        report.kind,
        report.layers,
        size(report.weight_bytes),
        size(report.buffer_bytes),
        report.ctx,
        load_s,
    ));
}

/// The device, for JSON.
pub fn device_json(report: &DeviceReport) -> Value {
    json!({"name": report.name, "backend": report.backend, "kind": report.kind, "driver": report.driver})
}

/// Token ids separated by commas.
pub fn token_list(text: &str) -> Result<Tokens, String> {
    ids(text).map(Tokens)
}

/// Numbers separated by commas, of a type that may hold more than token ids.
pub fn ids<T: FromStr>(text: &str) -> Result<Vec<T>, String> {
    let bad = |id| format!("expected token ids like 1,2,3, found '{id}'");
    text.split(',')
        .map(|id| id.trim().parse().map_err(|_| bad(id)))
        .collect()
}

/// Token ids. A type of its own, because the parser takes a plain list for a repeated flag.
#[derive(Clone, Debug)]
pub struct Tokens(pub Vec<u32>);

/// Token ids in the form that [`token_list`] reads.
pub fn show_tokens(tokens: &[u32]) -> String {
    tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_range_name_the_range() {
        assert_eq!(whole::<u32>("4294967295"), Ok(u32::MAX));
        assert_eq!(whole::<u64>("18446744073709551615"), Ok(u64::MAX));
        let range = "expected a whole number from 0 to 4294967295";
        for bad in ["-1", "4294967296", "1.5", "", "many"] {
            assert_eq!(whole::<u32>(bad).unwrap_err(), range);
        }
        assert!(whole::<u64>("-1").unwrap_err().ends_with("to 18446744073709551615"));
        assert_eq!(positive::<u32>("1"), Ok(1));
        assert_eq!(positive::<u32>("0").unwrap_err(), range.replace("from 0", "from 1"));
    }

    #[test]
    fn token_lists_are_numbers() {
        assert_eq!(token_list("1, 2,3").unwrap().0, [1, 2, 3]);
        for bad in ["", "1,", "-1", "1 2", "4294967296", "x"] {
            assert!(token_list(bad).is_err(), "{bad}");
        }
    }
}
