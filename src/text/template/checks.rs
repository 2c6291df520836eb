//! The tests after `is`.

use super::arguments::Arguments;
use super::ast::{Binary, Comparison};
use super::filters;
use super::limits::{Fault, Outcome};
use super::machine::Machine;
use super::value::Value;

/// The names of the tests.
const NAMES: &[&str] = &[
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
];

/// Whether there is a test of this name.
pub(super) fn exists(name: &str) -> bool {
    NAMES.contains(&name)
}

impl Machine<'_> {
    /// `value is name(args)`
    pub(super) fn test(&mut self, name: &str, value: Value, args: Arguments) -> Outcome<bool> {
        self.budget.steps(1)?;
        let comparison = match name {
            "==" | "eq" | "equalto" => Comparison::Equal,
            "!=" | "ne" => Comparison::NotEqual,
            "<" | "lt" | "lessthan" => Comparison::Less,
            "<=" | "le" => Comparison::LessEqual,
            ">" | "gt" | "greaterthan" => Comparison::Greater,
            ">=" | "ge" => Comparison::GreaterEqual,
            "in" => Comparison::In,
            "sameas" | "divisibleby" => return self.compared(name, value, args),
            _ if !exists(name) => return Err(Fault::new("unknown test", format!("no such name: '{name}'"))),
            _ => {
                args.none(name)?;
                return self.is(name, &value);
            }
        };
        let parameter = if comparison == Comparison::In { "seq" } else { "" };
        let [other] = args.bind(name, [parameter], 1)?;
        self.compare(comparison, &value, &other.unwrap_or(Value::None))
    }

    fn compared(&mut self, name: &str, value: Value, args: Arguments) -> Outcome<bool> {
        let parameter = if name == "sameas" { "other" } else { "num" };
        let [other] = args.bind(name, [parameter], 1)?;
        let other = other.unwrap_or(Value::None);
        match name {
            "sameas" => {
                self.budget.steps(value.weight().min(other.weight()) / 8)?;
                Ok(value.same(&other))
            }
            _ => self.remainder(&value, &other, 0),
        }
    }

    /// Whether `value % divisor` is `expected`.
    fn remainder(&mut self, value: &Value, divisor: &Value, expected: i128) -> Outcome<bool> {
        let rest = self.binary(Binary::Mod, value, divisor)?;
        Ok(rest.equals(&Value::Int(expected)))
    }

    /// The tests without arguments.
    fn is(&mut self, name: &str, value: &Value) -> Outcome<bool> {
        Ok(match name {
            "defined" => !value.is_undefined(),
            "undefined" => value.is_undefined(),
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "true" => matches!(value, Value::Bool(true)),
            "false" => matches!(value, Value::Bool(false)),
            "integer" => matches!(value, Value::Int(_)),
            "float" => matches!(value, Value::Float(_)),
            "number" => matches!(value, Value::Int(_) | Value::Float(_) | Value::Bool(_)),
            "string" => value.as_str().is_some(),
            "escaped" => matches!(value, Value::Markup(_)),
            "mapping" => matches!(value, Value::Dict(_)),
            "odd" => self.remainder(value, &Value::Int(2), 1)?,
            "even" => self.remainder(value, &Value::Int(2), 0)?,
            "lower" | "upper" => {
                let text = self.text(value)?;
                let method = format!("is{name}");
                self.method(&Value::Str(text), &method.into(), Arguments::default())?
                    .truth()
            }
            "filter" | "test" => match (value.as_str(), name) {
                (Some(known), "filter") => filters::find(known).is_some(),
                (Some(known), _) => exists(known),
                (None, _) => self.key_of(value.clone()).map(|_| false)?,
            },
            "callable" => matches!(
                value,
                Value::Macro(_)
                    | Value::Builtin(_)
                    | Value::Method(_)
                    | Value::Loop(_)
                    | Value::Joiner(_)
                    | Value::Undefined(_)
            ),
            "iterable" => {
                matches!(value, Value::Undefined(_) | Value::Iter(_) | Value::Loop(_)) || value.len().is_some()
            }
            "sequence" => !matches!(value, Value::View(..)) && value.len().is_some(),
            _ => return Err(Fault::new("unknown test", format!("no such name: '{name}'"))),
        })
    }
}
