//! Renders a conversation with the chat template of a model, which is an untrusted program.
//!
//! Reproduces the environment that chat templates are written for (trimmed blocks, Python methods, `tojson`,
//! `strftime_now`, `raise_exception`, `generation` blocks), and limits the time and memory of a rendering.

mod arguments;
mod arith;
mod ast;
mod attributes;
mod checks;
mod clock;
mod eval;
mod expressions;
mod filters;
mod format;
mod lexer;
mod limits;
mod machine;
mod methods;
mod names;
mod numerals;
mod parser;
mod sequences;
mod text;
mod value;
mod wrap;
mod write;

use crate::error::{Error, Kind, Result, bail};
use limits::{Budget, Fault};
use machine::Machine;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;
use value::Value as Variable;

/// Longest template source, in bytes.
const MAX_SOURCE: usize = 1 << 20;
/// Stack for parsing and rendering, in bytes. They recurse as deeply as the limits of the parser and of the rendering
/// allow.
const STACK: usize = 256 << 20;
/// Steps of a rendering, see [`Budget`].
const BASE_STEPS: u64 = 250_000;
const STEPS_PER_MESSAGE: u64 = 1_000;
/// One more step for so many bytes of input.
const INPUT_BYTES_PER_STEP: u64 = 2;
/// Bytes of text and lists that a rendering may make for each step that it may take.
const BYTES_PER_STEP: u64 = 64;
/// Deepest nesting of messages, tools and variables.
const MAX_INPUT_DEPTH: usize = 128;
/// Variables that callers cannot set in `kwargs`.
const RESERVED: [&str; 4] = ["messages", "tools", "add_generation_prompt", "strftime_now"];
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
    program: ast::Program,
}

impl ChatTemplate {
    /// Compiles `source`.
    ///
    /// Errors: `Template` with the line, for syntax errors, tags that load other templates, and sources above the
    /// limits.
    pub fn new(source: &str) -> Result<ChatTemplate> {
        if source.len() > MAX_SOURCE {
            let found = source.len();
            bail!(
                Template,
                "the template has {found} bytes, expected at most {MAX_SOURCE}"
            );
        }
        let known: names::Known = |name, test| match test {
            true => checks::exists(name),
            false => filters::find(name).is_some(),
        };
        let program = on_large_stack(|| {
            let parsed = lexer::tokens(source).and_then(parser::parse).and_then(|mut program| {
                names::resolve(&mut program, known)?;
                Ok(program)
            });
            parsed.map_err(|fault| failure(*fault))
        })?;
        Ok(ChatTemplate { program })
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
        let mut variables: HashMap<Arc<str>, Variable> = HashMap::new();
        for (name, builtin) in attributes::BUILTINS {
            variables.insert(name.into(), Variable::Builtin(builtin));
        }
        variables.insert("self".into(), Variable::Template);
        variables.insert("documents".into(), Variable::None);
        for (name, value) in options.special_tokens.iter().chain(&options.kwargs) {
            if RESERVED.contains(&name.as_str()) {
                bail!(Usage, "'{name}' cannot be set as a template variable");
            }
            variables.insert(name.as_str().into(), convert(value, 0, &mut size)?);
        }
        let tools = options.tools.as_ref().map(|tools| convert(tools, 0, &mut size));
        variables.insert("tools".into(), tools.transpose()?.unwrap_or(Variable::None));
        if let Some(documents) = &options.documents {
            variables.insert("documents".into(), convert(documents, 0, &mut size)?);
        }
        let list = Variable::list(list).map_err(|fault| failure(*fault))?;
        variables.insert("messages".into(), list);
        let prompt = Variable::Bool(options.add_generation_prompt);
        variables.insert("add_generation_prompt".into(), prompt);

        let steps = BASE_STEPS + STEPS_PER_MESSAGE * messages.len() as u64 + size as u64 / INPUT_BYTES_PER_STEP;
        let budget = Budget::new(steps, steps * BYTES_PER_STEP);
        let now = options.now.unwrap_or_else(SystemTime::now);
        let mut machine = Machine::new(&self.program, budget, variables, now);
        let mut prompt = machine.run().map_err(|fault| failure(*fault))?;
        if let Some(text) = final_text {
            cut(&mut prompt, &text)?;
        }
        Ok(prompt)
    }
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

/// The error for a template that cannot be compiled or rendered.
fn failure(fault: Fault) -> Error {
    let message = match fault {
        Fault::Raised(message) => message,
        Fault::Failed { class, message, line } => {
            let line = line.map_or(String::new(), |line| format!("line {line}: "));
            format!("{line}{class}: {message}")
        }
    };
    Error::new(Kind::Template, message)
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
fn convert(value: &Value, depth: usize, size: &mut usize) -> Result<Variable> {
    if depth > MAX_INPUT_DEPTH {
        bail!(
            Usage,
            "messages and variables are nested too deeply, expected at most {MAX_INPUT_DEPTH} levels"
        );
    }
    *size += 1;
    let made = match value {
        Value::Null => Ok(Variable::None),
        Value::Bool(value) => Ok(Variable::Bool(*value)),
        Value::Number(number) => match (number.as_i128(), number.as_f64()) {
            (Some(value), _) => Ok(Variable::Int(value)),
            (_, Some(value)) => Ok(Variable::Float(value)),
            _ => bail!(Usage, "the number {number} is not supported in templates"),
        },
        Value::String(text) => {
            *size += text.len();
            Ok(Variable::from(text.as_str()))
        }
        Value::Array(items) => {
            let items = items.iter().map(|item| convert(item, depth + 1, size));
            Variable::list(items.collect::<Result<_>>()?)
        }
        Value::Object(fields) => {
            let mut map = indexmap::IndexMap::with_capacity(fields.len());
            for (key, value) in fields {
                *size += key.len();
                let key: Arc<str> = key.as_str().into();
                map.insert(key.into(), convert(value, depth + 1, size)?);
            }
            Variable::dict(map)
        }
    };
    made.map_err(|fault| failure(*fault))
}
