//! Flags that several commands share, and how text becomes values.

use super::model::ModelArgs;
use super::output::{Output, size};
use super::overlay::{self, OverlayArgs};
use super::{Context, Result, usage};
use clap::builder::FalseyValueParser;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args};
use cmf_gpu::container::Container;
use cmf_gpu::engine::{Engine, LoadProgress, Placement};
use cmf_gpu::kernel::Kv;
use cmf_gpu::options::{DeviceChoice, LoadOptions, Overlay, Speculation, TaskChoice};
use cmf_gpu::{Error, Kind};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::Path;
use std::str::FromStr;

/// Most bytes of a text that is read at once.
const MAX_TEXT: u64 = 64 << 20;

/// Which device runs the model, and with which memory.
#[derive(Args)]
pub struct DeviceArgs {
    /// auto, gpu, cpu, software, a number in the list of devices, or a part of a name
    #[arg(long, env = "CMF_GPU_DEVICE", default_value = "auto", value_parser = device, hide_env = true)]
    device: DeviceChoice,
    /// Positions of the context; 0 = what the model was trained for [default: that, at most 4096]
    #[arg(
        short,
        long,
        visible_alias = "ctx-size",
        env = "CMF_GPU_CTX",
        value_parser = whole::<u32>,
        allow_negative_numbers = true,
        hide_env = true
    )]
    pub ctx: Option<u32>,
    /// Type of cached keys and values: f16 or f32
    #[arg(long, env = "CMF_GPU_KV", default_value = "f16", value_parser = kv, hide_env = true)]
    pub kv: Kv,
    /// Most device memory to use, in MiB
    #[arg(
        long,
        env = "CMF_GPU_VRAM_MB",
        value_name = "MIB",
        value_parser = whole::<u64>,
        allow_negative_numbers = true,
        hide_env = true
    )]
    vram_mb: Option<u64>,
    /// Compiles shaders with bounds checks, to find out
    #[arg(long, env = "CMF_GPU_CHECKED_SHADERS", value_parser = FalseyValueParser::new(), hide_env = true)]
    checked_shaders: bool,
}

/// Which mask is active.
#[derive(Args)]
pub struct TaskArgs {
    /// The task whose mask is active, none = the full model [default: the active skill's, else the file's default task, if it
    /// has such a mask]
    #[arg(long, env = "CMF_GPU_TASK", value_name = "NAME", value_parser = task, hide_env = true)]
    task: Option<TaskChoice>,
}

impl TaskArgs {
    /// The choice, open where there is none.
    pub fn choice(&self) -> TaskChoice {
        self.task.clone().unwrap_or_default()
    }
}

/// What runs where, under which mask and with which skills: the flags of every command that runs a model for its own sake.
#[derive(Args)]
pub struct LoadArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub task: TaskArgs,
    #[command(flatten)]
    pub overlay: OverlayArgs,
}

impl LoadArgs {
    /// The library's options, without drafts and skills.
    pub fn options(&self) -> LoadOptions {
        LoadOptions {
            task: self.task.choice(),
            ..self.device.options()
        }
    }
}

impl DeviceArgs {
    /// The library's options, without drafts, masks and skills.
    pub fn options(&self) -> LoadOptions {
        LoadOptions {
            device: self.device.clone(),
            ctx: self.ctx,
            kv: self.kv,
            vram_mb: self.vram_mb,
            checked_shaders: self.checked_shaders,
            all_logits: false,
            speculation: Speculation::Off,
            task: TaskChoice::Default,
            count_routes: false,
            overlay: Overlay::Backbone,
        }
    }
}

fn device(text: &str) -> std::result::Result<DeviceChoice, String> {
    // The parser puts the flag in front; the kind is that of every wrong flag.
    text.parse().map_err(|err: Error| err.message)
}

/// A whole number that is not negative. Errors: which numbers there are.
pub fn whole<T: TryFrom<u64>>(text: &str) -> std::result::Result<T, String> {
    whole_from(0, text)
}

/// A whole number above 0. Errors: which numbers there are.
pub fn positive<T: TryFrom<u64>>(text: &str) -> std::result::Result<T, String> {
    whole_from(1, text)
}

fn whole_from<T: TryFrom<u64>>(least: u64, text: &str) -> std::result::Result<T, String> {
    let number = text.parse::<u64>().ok().filter(|&number| number >= least);
    number.and_then(|number| T::try_from(number).ok()).ok_or_else(|| {
        format!(
            "wanted a whole number from {least} to {}",
            u64::MAX >> (64 - 8 * size_of::<T>())
        )
    })
}

fn kv(text: &str) -> std::result::Result<Kv, String> {
    match text {
        "f16" => Ok(Kv::F16),
        "f32" => Ok(Kv::F32),
        "q8" => Err("quantised caches are not implemented yet; use f16, or f32 for twice the memory".into()),
        _ => Err("wanted f16 or f32".into()),
    }
}

fn task(text: &str) -> std::result::Result<TaskChoice, String> {
    text.parse().map_err(|err: Error| err.message)
}

/// Loads a model, shows how far it is, and says what runs where. The first Ctrl-C ends it.
pub fn load(container: Container, options: &LoadOptions, context: &mut Context) -> Result<Engine> {
    let engine = with_progress(context, |progress| Engine::open(container, options, progress))?;
    announce(engine.placement(), engine.load_s(), &context.out);
    overlay::announce(&engine, &context.out);
    if let Some(task) = engine.task() {
        context.out.note(format!("task {task}"));
    }
    Ok(engine)
}

/// Shows how far loading is; the first Ctrl-C ends it.
pub fn with_progress<T>(context: &mut Context, load: impl FnOnce(LoadProgress) -> Result<T>) -> Result<T> {
    let cancel = context.interrupt.graceful();
    let mut bar = context.out.progress("loading", true);
    load(&mut |done, total| {
        bar.set(done, total);
        match cancel.is_cancelled() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })
}

/// Says what runs where.
pub fn announce(placement: &Placement, load_s: f64, out: &Output) {
    if let Some(notice) = &placement.notice {
        out.note(format!("note: {notice}"));
    }
    out.note(format!(
        "{} ({}, {}): {} layers, {} weights, {} buffers, context {}, loaded in {:.2} s",
        placement.name,
        placement.backend,
        placement.kind,
        placement.layers,
        size(placement.weight_bytes),
        size(placement.buffer_bytes),
        placement.ctx,
        load_s,
    ));
}

/// The device of an answer, for JSON.
pub fn device_json(placement: &Placement) -> Value {
    json!({
        "name": placement.name, "backend": placement.backend, "kind": placement.kind, "driver": placement.driver
    })
}

/// Token ids separated by commas.
pub fn token_list(text: &str) -> std::result::Result<Tokens, String> {
    ids(text).map(Tokens)
}

/// The same as numbers of a type that may hold more than ids.
pub fn ids<T: FromStr>(text: &str) -> std::result::Result<Vec<T>, String> {
    let ids = text.split(',').map(|id| {
        id.trim()
            .parse()
            .map_err(|_| format!("wanted token ids like 1,2,3, found '{id}'"))
    });
    ids.collect()
}

/// Token ids; a type of its own, because the parser takes a plain list for a flag that can be repeated.
#[derive(Clone, Debug)]
pub struct Tokens(pub Vec<u32>);

/// The ids that are shown, in the form that is read.
pub fn show_tokens(tokens: &[u32]) -> String {
    tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// Which of several flags that exclude each other is in force: the one on the command line, else the one from the
/// environment. Errors: `Usage` when one of these two holds several.
pub fn chosen(matches: &ArgMatches, flags: &[&'static str]) -> Result<Option<&'static str>> {
    for source in [ValueSource::CommandLine, ValueSource::EnvVariable] {
        let found: Vec<_> = flags
            .iter()
            .filter(|flag| matches.value_source(flag) == Some(source))
            .collect();
        match found.as_slice() {
            [] => continue,
            [one] => return Ok(Some(one)),
            [one, two, ..] => {
                let dashed = |flag: &str| flag.replace('_', "-");
                return Err(usage(format!(
                    "--{} and --{} exclude each other",
                    dashed(one),
                    dashed(two)
                )));
            }
        }
    }
    Ok(None)
}

/// A text file, `-` for stdin. Errors: `Io`; `Parse` when it is not UTF-8; `Usage` when it is too long.
pub fn read_text(path: &Path) -> Result<String> {
    if path == Path::new("-") {
        return read_stream(std::io::stdin().lock(), Path::new("stdin"));
    }
    let file = File::open(path).map_err(|err| Error::io(path, &err))?;
    read_stream(file, path)
}

fn read_stream(stream: impl Read, path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    stream
        .take(MAX_TEXT + 1)
        .read_to_end(&mut bytes)
        .map_err(|err| Error::io(path, &err))?;
    let shown = path.display();
    if bytes.len() as u64 > MAX_TEXT {
        return Err(usage(format!("{shown}: longer than {}", size(MAX_TEXT))));
    }
    String::from_utf8(bytes).map_err(|err| {
        let at = err.utf8_error().valid_up_to();
        Error::new(Kind::Parse, format!("{shown}: not UTF-8 at byte {at}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_say_their_range() {
        assert_eq!(whole::<u32>("4294967295"), Ok(u32::MAX));
        assert_eq!(whole::<u64>("18446744073709551615"), Ok(u64::MAX));
        for bad in ["-1", "4294967296", "1.5", "", "many"] {
            assert_eq!(
                whole::<u32>(bad).unwrap_err(),
                "wanted a whole number from 0 to 4294967295"
            );
        }
        assert!(whole::<u64>("-1").unwrap_err().ends_with("to 18446744073709551615"));
        assert_eq!(positive::<u32>("1"), Ok(1));
        assert_eq!(
            positive::<u32>("0").unwrap_err(),
            "wanted a whole number from 1 to 4294967295"
        );
    }

    #[test]
    fn token_lists_are_numbers() {
        assert_eq!(token_list("1, 2,3").unwrap().0, [1, 2, 3]);
        for bad in ["", "1,", "-1", "1 2", "4294967296", "x"] {
            assert!(token_list(bad).is_err(), "{bad}");
        }
    }
}
