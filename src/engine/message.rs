//! Messages of a conversation.

use crate::error::{Error, Result, bail};
use serde_json::{Map, Value, json};

/// A message of a conversation: a JSON object with `role`, `content` and whatever else the model's chat template reads, such
/// as `tool_calls`.
#[derive(Clone, Debug, PartialEq)]
pub struct Message(Map<String, Value>);

impl Message {
    fn new(role: &str, content: String) -> Message {
        Message(Map::from_iter([
            ("role".to_owned(), json!(role)),
            ("content".to_owned(), json!(content)),
        ]))
    }

    /// Instructions for the model, at the start of a conversation.
    pub fn system(content: impl Into<String>) -> Message {
        Message::new("system", content.into())
    }

    /// A message of the user.
    pub fn user(content: impl Into<String>) -> Message {
        Message::new("user", content.into())
    }

    /// An answer of the model.
    pub fn assistant(content: impl Into<String>) -> Message {
        Message::new("assistant", content.into())
    }

    /// The result of a tool call.
    pub fn tool(content: impl Into<String>) -> Message {
        Message::new("tool", content.into())
    }

    /// The same message with another field, such as `tool_calls` or `name`. A field of the same name is replaced.
    pub fn field(mut self, name: impl Into<String>, value: impl Into<Value>) -> Message {
        self.0.insert(name.into(), value.into());
        self
    }

    /// The role: `system`, `user`, `assistant`, `tool` or another one that the template knows.
    pub fn role(&self) -> &str {
        self.0.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    /// The text; empty if the content is not a text.
    pub fn content(&self) -> &str {
        self.0.get("content").and_then(Value::as_str).unwrap_or_default()
    }

    /// All fields, as the template gets them.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.0
    }
}

impl TryFrom<Value> for Message {
    type Error = Error;

    /// Errors: `Usage` for anything but an object with a text as `role`.
    fn try_from(value: Value) -> Result<Message> {
        match value {
            Value::Object(fields) if fields.get("role").is_some_and(Value::is_string) => Ok(Message(fields)),
            other => bail!(Usage, "a message: expected an object with a role, found {other}"),
        }
    }
}

impl From<Message> for Value {
    fn from(message: Message) -> Value {
        Value::Object(message.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn messages_keep_their_json_form() {
        let call = json!({"role": "assistant", "content": null, "tool_calls": [{"id": 1}]});
        let message = Message::try_from(call.clone()).unwrap();
        assert_eq!((message.role(), message.content()), ("assistant", ""));
        assert_eq!(Value::from(message), call);
        let result = Message::tool("42").field("tool_call_id", 1);
        assert_eq!(
            Value::from(result),
            json!({"role": "tool", "content": "42", "tool_call_id": 1})
        );
        for bad in [json!([]), json!({"content": "x"}), json!({"role": 1})] {
            assert_eq!(Message::try_from(bad).unwrap_err().kind, Kind::Usage);
        }
    }
}
