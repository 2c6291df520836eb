//! Renders a conversation with the chat template of a model, which is an untrusted program.
//!
//! Reproduces the environment that chat templates are written for (trimmed blocks, Python methods, `tojson`,
//! `strftime_now`, `raise_exception`, `generation` blocks), and limits the time and memory of a rendering.

mod clock;
mod harden;
mod lexer;
mod python;
mod scan;
mod write;

use crate::error::{Error, Kind, Result, bail};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value as JinjaValue;
use minijinja::{AutoEscape, Environment, ErrorKind};
use serde_json::{Map, Value};
use std::time::SystemTime;

/// Name of the template in minijinja.
const NAME: &str = "chat_template";
/// Stack for parsing and rendering, in bytes. They recurse; a template within the limits of `scan` needs less than
/// this.
const STACK: usize = 256 << 20;
/// Fuel of a rendering. One unit pays for one instruction or 64 bytes of text.
const BASE_FUEL: u64 = 250_000;
const FUEL_PER_MESSAGE: u64 = 1_000;
/// One more unit for so many bytes of input, so that each byte may be copied 32 times.
const INPUT_BYTES_PER_FUEL: u64 = 2;
/// Deepest nesting of messages, tools and variables.
const MAX_INPUT_DEPTH: usize = 128;
/// Variables that callers cannot set in `kwargs`.
const RESERVED: [&str; 5] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "strftime_now",
];
/// Marks the end of the final message while it is rendered: a Unicode noncharacter, which ordinary text does not
/// contain, and a space, which is missing in the prompt if the template trims messages.
const END_MARK: &str = "\u{fdd1} ";

const CHATML: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
                      {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// The inputs of a rendering besides the messages.
#[derive(Clone, Debug, Default)]
pub struct RenderOptions {
    /// Ends the prompt with the start of an assistant message.
    pub add_generation_prompt: bool,
    /// Ends the prompt within the last message, so that the model continues it.
    pub continue_final_message: bool,
    /// Tool descriptions: the variable `tools`, `none` if absent.
    pub tools: Option<Value>,
    /// Documents for retrieval: the variable `documents`, `none` if absent.
    pub documents: Option<Value>,
    /// Variables for special tokens, see [`special_tokens_map`](crate::text::special_tokens_map).
    pub special_tokens: Map<String, Value>,
    /// Further variables, such as `enable_thinking`. They override those for special tokens.
    pub kwargs: Map<String, Value>,
    /// The time for `strftime_now`, which writes it in UTC. The system clock if absent.
    pub now: Option<SystemTime>,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
}

impl ChatTemplate {
    /// Compiles `source`.
    ///
    /// Errors: `Template` with the line, for syntax errors, tags that load other templates, and sources above the
    /// limits.
    pub fn new(source: &str) -> Result<ChatTemplate> {
        let source = scan::prepare(source)?;
        let mut environment = environment()?;
        let environment = on_large_stack(move || {
            environment
                .add_template_owned(NAME, source)
                .map_err(|err| failure(&err))?;
            Ok(environment)
        })?;
        Ok(ChatTemplate { environment })
    }

    /// The ChatML template, for model files without a template.
    pub fn chatml() -> Result<ChatTemplate> {
        ChatTemplate::new(CHATML)
    }

    /// The prompt for `messages`, each an object with `role`, `content` and so on.
    ///
    /// Like the reference implementation, it drops keys whose value is null, copies `reasoning` and `thinking` to
    /// `reasoning_content`, and replaces tool call arguments that are a JSON object in a string by that object.
    ///
    /// Errors: `Template` if the template calls `raise_exception` (with its message) or fails (with the line);
    /// `Usage` for invalid messages and options.
    pub fn render(&self, messages: &[Value], options: &RenderOptions) -> Result<String> {
        if options.continue_final_message && options.add_generation_prompt {
            bail!(
                Usage,
                "continue_final_message and add_generation_prompt cannot be combined"
            );
        }
        if options.continue_final_message && messages.is_empty() {
            bail!(Usage, "continue_final_message needs at least one message");
        }
        on_large_stack(|| self.render_here(messages, options))
    }

    fn render_here(&self, messages: &[Value], options: &RenderOptions) -> Result<String> {
        let mut size = 0;
        let mut list = Vec::with_capacity(messages.len());
        let mut final_text = None;
        for (i, message) in messages.iter().enumerate() {
            let Value::Object(message) = message else {
                bail!(Usage, "message {i} is not a JSON object");
            };
            let mut message = prepare(message);
            if options.continue_final_message && i + 1 == messages.len() {
                final_text = Some(mark_end(&mut message)?);
            }
            list.push(convert(&Value::Object(message), 0, &mut size)?);
        }
        let mut variables = Vec::new();
        for (name, value) in options.special_tokens.iter().chain(&options.kwargs) {
            if RESERVED.contains(&name.as_str()) {
                bail!(Usage, "'{name}' cannot be set as a template variable");
            }
            variables.push((name.clone(), convert(value, 0, &mut size)?));
        }
        for (name, value) in [("tools", &options.tools), ("documents", &options.documents)] {
            let value = value.as_ref().map(|value| convert(value, 0, &mut size)).transpose()?;
            variables.push((name.into(), value.unwrap_or_else(|| JinjaValue::from(()))));
        }
        variables.push(("messages".into(), JinjaValue::from(list)));
        variables.push((
            "add_generation_prompt".into(),
            JinjaValue::from(options.add_generation_prompt),
        ));
        let now = options.now.unwrap_or_else(SystemTime::now);
        variables.push((
            "strftime_now".into(),
            JinjaValue::from_function(move |state: &minijinja::State, format: &str| {
                state.consume_fuel(format.len() as u64)?;
                clock::strftime(format, now).map_err(|why| write::invalid(format!("strftime_now: {why}")))
            }),
        ));

        let mut environment = self.environment.clone();
        environment.set_fuel(Some(
            BASE_FUEL + FUEL_PER_MESSAGE * messages.len() as u64 + size as u64 / INPUT_BYTES_PER_FUEL,
        ));
        let template = environment.get_template(NAME).map_err(|err| failure(&err))?;
        let mut prompt = template
            .render(JinjaValue::from_pairs(variables))
            .map_err(|err| failure(&err))?;
        if let Some(text) = final_text {
            cut(&mut prompt, &text)?;
        }
        Ok(prompt)
    }
}

fn environment() -> Result<Environment<'static>> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|err| failure(&err))?;
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(python::method);
    python::install(&mut environment);
    harden::install(&mut environment);
    environment.remove_global("debug");
    // Jinja has no such filters, and they can grow a value without limit.
    for filter in ["chain", "zip"] {
        environment.remove_filter(filter);
    }
    environment.add_filter("tojson", write::tojson);
    environment.add_function(
        "raise_exception",
        |state: &minijinja::State, message: &JinjaValue| -> Result<JinjaValue, minijinja::Error> {
            let raised = Error::new(Kind::Template, python::text(state, message)?);
            Err(write::invalid("raise_exception").with_source(raised))
        },
    );
    Ok(environment)
}

/// Runs `work` in a thread whose stack is large enough for deep recursion.
fn on_large_stack<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("chat template".into())
            .stack_size(STACK);
        match thread.spawn_scoped(scope, work) {
            Ok(handle) => match handle.join() {
                Ok(result) => result,
                Err(_) => bail!(Template, "the template engine panicked on this template"),
            },
            Err(err) => bail!(Io, "starting a thread for the chat template failed: {err}"),
        }
    })
}

/// Converts an error of minijinja.
fn failure(err: &minijinja::Error) -> Error {
    let mut source = std::error::Error::source(err);
    while let Some(cause) = source {
        // That of `raise_exception`, not an error of minijinja.
        if let Some(raised) = cause.downcast_ref::<Error>() {
            return raised.clone();
        }
        source = cause.source();
    }
    let what = match (err.kind(), err.detail()) {
        (ErrorKind::OutOfFuel, _) => "the template exceeded its limits of time and memory".to_string(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    let line = err.line().map_or(String::new(), |line| format!("line {line}: "));
    Error::new(Kind::Template, line + &what)
}

/// The message in the form that templates expect, see [`ChatTemplate::render`].
fn prepare(message: &Map<String, Value>) -> Map<String, Value> {
    let mut message: Map<String, Value> = message
        .iter()
        .filter(|(_, value)| !value.is_null())
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    let reasoning = ["reasoning_content", "reasoning", "thinking"]
        .iter()
        .find_map(|key| message.get(*key))
        .cloned();
    if let Some(reasoning) = reasoning {
        for key in ["reasoning_content", "thinking"] {
            message.entry(key).or_insert_with(|| reasoning.clone());
        }
    }
    if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
        for call in calls {
            let call = match call.get_mut("function") {
                Some(function) => function,
                None => call,
            };
            if let Some(arguments) = call.get_mut("arguments")
                && let Value::String(text) = arguments
                && let Ok(object @ Value::Object(_)) = serde_json::from_str(text)
            {
                *arguments = object;
            }
        }
    }
    message
}

/// Appends the end mark to the last text of the message and returns the text without it.
fn mark_end(message: &mut Map<String, Value>) -> Result<String> {
    let text = match message.get_mut("content") {
        Some(Value::String(text)) => Some(text),
        Some(Value::Array(parts)) => parts.iter_mut().rev().find_map(|part| match part.get_mut("text") {
            Some(Value::String(text)) => Some(text),
            _ => None,
        }),
        _ => None,
    };
    let Some(text) = text else {
        bail!(Usage, "continue_final_message needs a final message with text");
    };
    let plain = text.clone();
    text.push_str(END_MARK);
    Ok(plain)
}

/// Cuts `prompt` at the end of `text`, the text of the final message.
fn cut(prompt: &mut String, text: &str) -> Result<()> {
    let mark = END_MARK.trim_end();
    let Some(at) = prompt.rfind(mark).filter(|_| prompt.contains(text.trim())) else {
        bail!(
            Template,
            "continue_final_message: the template does not print the final message"
        );
    };
    let trims = !prompt[at..].starts_with(END_MARK);
    prompt.truncate(at);
    if trims {
        prompt.truncate(prompt.trim_end().len());
    }
    Ok(())
}

/// Converts JSON to a template value. Adds its size to `size`: the bytes of strings and keys, and one per value.
fn convert(value: &Value, depth: usize, size: &mut usize) -> Result<JinjaValue> {
    if depth > MAX_INPUT_DEPTH {
        bail!(
            Usage,
            "messages and variables are nested too deeply, expected at most {MAX_INPUT_DEPTH} levels"
        );
    }
    *size += 1;
    Ok(match value {
        Value::Null => JinjaValue::from(()),
        Value::Bool(value) => JinjaValue::from(*value),
        Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(value), ..) => JinjaValue::from(value),
            (_, Some(value), _) => JinjaValue::from(value),
            (.., Some(value)) => JinjaValue::from(value),
            _ => bail!(Usage, "the number {number} is not supported in templates"),
        },
        Value::String(text) => {
            *size += text.len();
            JinjaValue::from(text.as_str())
        }
        Value::Array(items) => JinjaValue::from(
            items
                .iter()
                .map(|item| convert(item, depth + 1, size))
                .collect::<Result<Vec<_>>>()?,
        ),
        Value::Object(fields) => {
            let mut pairs = Vec::with_capacity(fields.len());
            for (key, value) in fields {
                *size += key.len();
                pairs.push((key.as_str(), convert(value, depth + 1, size)?));
            }
            JinjaValue::from_pairs(pairs)
        }
    })
}
