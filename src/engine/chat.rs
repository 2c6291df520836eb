//! Answering: rendering a conversation, running the model, and streaming the text.

use super::answer::Answer;
use super::load::Engine;
use super::message::Message;
use crate::error::{Error, Result};
use crate::lm::run::{Cancel, Finish, Generation};
use crate::notice::Notice;
use crate::options::{AnswerOptions, DEFAULT_MAX_TOKENS};
use crate::sampling::MAX_STOPS;
use crate::text::{self, RenderOptions, TextStream};
use serde_json::{Map, Value};
use std::ops::ControlFlow;
use std::time::Instant;

/// Receives the text of an answer while it is generated, and may end the answer.
pub type OnText<'a> = &'a mut dyn FnMut(&str) -> ControlFlow<()>;

impl Engine {
    /// The prompt of a conversation, as text and as tokens. `kwargs` are further variables of the template. Special tokens in
    /// the messages become ordinary text.
    ///
    /// Errors: `Tokenizer`, `Template`.
    pub fn render(&self, messages: &[Message], kwargs: &Map<String, Value>) -> Result<(String, Vec<u32>)> {
        let (tokenizer, template) = (self.tokenizer()?, self.template()?);
        let options = RenderOptions {
            add_generation_prompt: true,
            special_tokens: self.special_tokens.clone(),
            kwargs: kwargs.clone(),
            ..RenderOptions::default()
        };
        let messages: Vec<Value> = messages.iter().cloned().map(Value::from).collect();
        let guarded = text::guard_messages(tokenizer, &messages)?;
        let tokens = tokenizer.encode_guarded(&template.render(&guarded, &options)?)?;
        Ok((template.render(&messages, &options)?, tokens))
    }

    /// Answers a conversation. Reuses the cache for the part that it shares with the conversation before. `on_text` receives
    /// the text while it is generated, and may end the answer, which is then [`Finish::Interrupted`].
    ///
    /// Errors: as [`Engine::continue_tokens`], `Tokenizer`, `Template`.
    pub fn chat(
        &mut self,
        messages: &[Message],
        options: &AnswerOptions,
        cancel: &Cancel,
        on_text: OnText,
    ) -> Result<Answer> {
        let (_, tokens) = self.render(messages, &options.template_kwargs)?;
        self.continue_tokens(&tokens, options, cancel, on_text)
    }

    /// Continues a text, without a template. Otherwise like [`Engine::chat`].
    pub fn complete(
        &mut self,
        prompt: &str,
        options: &AnswerOptions,
        cancel: &Cancel,
        on_text: OnText,
    ) -> Result<Answer> {
        let tokens = self.tokenizer()?.encode(prompt, true)?;
        self.continue_tokens(&tokens, options, cancel, on_text)
    }

    /// Continues a list of tokens. Otherwise like [`Engine::chat`]. The text stays empty if the file has no tokenizer.
    ///
    /// Errors: `ContextFull`, `NonFinite`, `Usage`, those of the device. Before an error `on_text` receives the text so far.
    /// The engine can be used afterwards.
    pub fn continue_tokens(
        &mut self,
        prompt: &[u32],
        options: &AnswerOptions,
        cancel: &Cancel,
        on_text: OnText,
    ) -> Result<Answer> {
        let start = Instant::now();
        let generation = Generation {
            sampling: options.sampling.clone().unwrap_or_else(|| self.defaults.clone()),
            // The device stops at these; the receiver stops at all.
            stops: self.stops.iter().copied().take(MAX_STOPS).collect(),
            max_tokens: options.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS),
        };
        generation.sampling.validate()?;
        let stream = self
            .tokenizer
            .as_ref()
            .map(|tokenizer| tokenizer.stream(true, &options.stop));
        let stream = stream.transpose()?;
        let session = &mut self.loaded.session;
        let mut answer = Answer::new(prompt.len());
        let (prefilled_tokens, flow) = session.prefill(prompt, cancel)?;
        answer.prefilled_tokens = prefilled_tokens;
        answer.cached_tokens = session.cached().len() - prefilled_tokens;
        if flow.is_break() {
            answer.prefill_s = start.elapsed().as_secs_f64();
            return Ok(answer);
        }
        let mut receiver = Receiver {
            stops: &self.stops,
            stream,
            on_text,
            answer: &mut answer,
            first_token_at: None,
            error: None,
        };
        let finish = session.generate(&generation, cancel, &mut |token| receiver.token(token));
        let finish = receiver.finish(finish)?;
        let end = Instant::now();
        let first = receiver.first_token_at.unwrap_or(end);
        answer.finish = finish;
        answer.prefill_s = first.duration_since(start).as_secs_f64();
        answer.decode_s = end.duration_since(first).as_secs_f64();
        (answer.decode_runs, answer.decode_counters) = session.decode_cost();
        answer.speculated = session.speculated();
        answer.notices = std::mem::take(&mut self.pending_notices);
        answer.notices.extend(session.take_notice().map(Notice::from));
        Ok(answer)
    }
}

/// Receives the tokens of an answer, decodes them and passes the text on.
struct Receiver<'a> {
    stops: &'a [u32],
    stream: Option<TextStream<'a>>,
    on_text: OnText<'a>,
    answer: &'a mut Answer,
    first_token_at: Option<Instant>,
    /// An error of decoding, which ended the answer.
    error: Option<Error>,
}

impl Receiver<'_> {
    fn token(&mut self, token: u32) -> ControlFlow<Finish> {
        self.first_token_at.get_or_insert_with(Instant::now);
        self.answer.tokens.push(token);
        if self.stops.contains(&token) {
            return ControlFlow::Break(Finish::Stop);
        }
        let Some(stream) = &mut self.stream else {
            return ControlFlow::Continue(());
        };
        let text = match stream.push(token) {
            Ok(text) => text,
            Err(err) => {
                self.error = Some(err);
                return ControlFlow::Break(Finish::Stop);
            }
        };
        let stopped = stream.stopped().is_some();
        let flow = self.pass_on(&text);
        match (stopped, flow) {
            (true, _) => ControlFlow::Break(Finish::Stop),
            (false, ControlFlow::Break(())) => ControlFlow::Break(Finish::Interrupted),
            (false, ControlFlow::Continue(())) => ControlFlow::Continue(()),
        }
    }

    fn pass_on(&mut self, text: &str) -> ControlFlow<()> {
        if text.is_empty() {
            return ControlFlow::Continue(());
        }
        self.answer.text.push_str(text);
        (self.on_text)(text)
    }

    /// Passes on the last text, also if generating failed. Returns why the answer ended.
    fn finish(&mut self, finish: Result<Finish>) -> Result<Finish> {
        if let Some(err) = self.error.take() {
            return Err(err);
        }
        if let Some(stream) = &mut self.stream {
            let text = stream.finish()?;
            // The answer has ended already.
            let _ = self.pass_on(&text);
        }
        finish
    }
}
