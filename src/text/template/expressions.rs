//! Parses the expressions of a template. The precedence is that of Jinja 3.1, which differs from Python's for `~`, `**`
//! and signs.

use super::ast::{Applied, Args, Binary, Comparison, Expr, Kind};
use super::lexer::Lexeme;
use super::limits::Outcome;
use super::parser::{MAX_ARGUMENTS, Parser, syntax};
use std::sync::Arc;

impl Parser {
    /// `value if condition else other`, or anything that binds more tightly.
    pub(super) fn expression(&mut self) -> Outcome<Expr> {
        self.nested(|parser| {
            let mut value = parser.or()?;
            while parser.is_name("if") {
                let line = parser.line();
                parser.skip();
                let condition = parser.or()?;
                let other = match parser.eat_name("else") {
                    true => Some(Box::new(parser.expression()?)),
                    false => None,
                };
                value = parser.expr(line, Kind::Choice(Box::new(condition), Box::new(value), other))?;
            }
            Ok(value)
        })
    }

    /// One expression, or several with commas between them. Without `choice`, `if` ends it, as do the names `ends`.
    pub(super) fn tuple(&mut self, choice: bool, ends: &[&str]) -> Outcome<Expr> {
        self.tuple_or_empty(choice, ends, false)
    }

    fn tuple_or_empty(&mut self, choice: bool, ends: &[&str], empty: bool) -> Outcome<Expr> {
        let line = self.line();
        let mut items = Vec::new();
        let mut is_tuple = false;
        loop {
            let end = matches!(self.peek(), Lexeme::PrintEnd | Lexeme::TagEnd) || self.is_op(")");
            if end || ends.iter().any(|end| self.is_name(end)) {
                break;
            }
            items.push(match choice {
                true => self.expression()?,
                false => self.nested(Parser::or)?,
            });
            if !self.eat(",") {
                break;
            }
            is_tuple = true;
        }
        match items.len() {
            0 if !empty => Err(self.unexpected("an expression")),
            1 if !is_tuple => Ok(items.remove(0)),
            _ => self.expr(line, Kind::Tuple(items)),
        }
    }

    fn or(&mut self) -> Outcome<Expr> {
        let mut left = self.and()?;
        while self.is_name("or") {
            let line = self.line();
            self.skip();
            let right = self.and()?;
            left = self.expr(line, Kind::Or(Box::new(left), Box::new(right)))?;
        }
        Ok(left)
    }

    fn and(&mut self) -> Outcome<Expr> {
        let mut left = self.not()?;
        while self.is_name("and") {
            let line = self.line();
            self.skip();
            let right = self.not()?;
            left = self.expr(line, Kind::And(Box::new(left), Box::new(right)))?;
        }
        Ok(left)
    }

    fn not(&mut self) -> Outcome<Expr> {
        let line = self.line();
        if !self.eat_name("not") {
            return self.compare();
        }
        let value = self.nested(Parser::not)?;
        self.expr(line, Kind::Not(Box::new(value)))
    }

    fn compare(&mut self) -> Outcome<Expr> {
        let line = self.line();
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let not_in = self.is_name("not") && matches!(self.peek_second(), Lexeme::Name(name) if **name == *"in");
            let comparison = match self.peek() {
                Lexeme::Op("==") => Comparison::Equal,
                Lexeme::Op("!=") => Comparison::NotEqual,
                Lexeme::Op("<") => Comparison::Less,
                Lexeme::Op("<=") => Comparison::LessEqual,
                Lexeme::Op(">") => Comparison::Greater,
                Lexeme::Op(">=") => Comparison::GreaterEqual,
                Lexeme::Name(name) if **name == *"in" => Comparison::In,
                _ if not_in => {
                    self.skip();
                    Comparison::NotIn
                }
                _ => break,
            };
            self.skip();
            rest.push((comparison, self.sum()?));
        }
        match rest.is_empty() {
            true => Ok(first),
            false => self.expr(line, Kind::Compare(Box::new(first), rest)),
        }
    }

    /// Operands of `next` with one of `operators` between them, from left to right.
    fn binary(&mut self, operators: &[(&str, Binary)], next: impl Fn(&mut Self) -> Outcome<Expr>) -> Outcome<Expr> {
        let mut left = next(self)?;
        while let Some((_, operator)) = operators.iter().find(|(op, _)| self.is_op(op)) {
            let line = self.line();
            self.skip();
            let right = next(self)?;
            left = self.expr(line, Kind::Binary(*operator, Box::new(left), Box::new(right)))?;
        }
        Ok(left)
    }

    fn sum(&mut self) -> Outcome<Expr> {
        self.binary(&[("+", Binary::Add), ("-", Binary::Sub)], Parser::concat)
    }

    fn concat(&mut self) -> Outcome<Expr> {
        let line = self.line();
        let mut parts = vec![self.product()?];
        while self.eat("~") {
            parts.push(self.product()?);
        }
        match parts.len() {
            1 => Ok(parts.remove(0)),
            _ => self.expr(line, Kind::Concat(parts)),
        }
    }

    fn product(&mut self) -> Outcome<Expr> {
        let operators = [
            ("*", Binary::Mul),
            ("/", Binary::Div),
            ("//", Binary::FloorDiv),
            ("%", Binary::Mod),
        ];
        self.binary(&operators, Parser::power)
    }

    fn power(&mut self) -> Outcome<Expr> {
        self.binary(&[("**", Binary::Pow)], |parser| parser.unary(true))
    }

    fn unary(&mut self, filters: bool) -> Outcome<Expr> {
        let line = self.line();
        let negative = self.is_op("-");
        let value = if negative || self.is_op("+") {
            self.skip();
            let value = self.nested(|parser| parser.unary(false))?;
            self.expr(line, Kind::Sign(negative, Box::new(value)))?
        } else {
            self.primary()?
        };
        let value = self.postfix(value)?;
        if filters { self.filtered(value) } else { Ok(value) }
    }

    /// The filters, tests and calls after a value.
    fn filtered(&mut self, mut value: Expr) -> Outcome<Expr> {
        loop {
            let line = self.line();
            value = if self.eat("|") {
                let applied = self.applied()?;
                self.expr(line, Kind::Filter(Box::new(value), Box::new(applied)))?
            } else if self.eat_name("is") {
                self.test(value, line)?
            } else if self.is_op("(") {
                self.call(value)?
            } else {
                return Ok(value);
            };
        }
    }

    fn primary(&mut self) -> Outcome<Expr> {
        let line = self.line();
        let kind = match self.peek().clone() {
            Lexeme::Name(name) => {
                self.read(&name);
                match &*name {
                    "true" | "True" => Kind::Bool(true),
                    "false" | "False" => Kind::Bool(false),
                    "none" | "None" => Kind::None,
                    _ => Kind::Name(name),
                }
            }
            Lexeme::Str(first) => {
                let mut text = first.to_string();
                while let Lexeme::Str(more) = self.peek_second() {
                    text.push_str(more);
                    self.skip();
                }
                Kind::Str(text.into())
            }
            Lexeme::Int(number) => Kind::Int(number),
            Lexeme::Float(number) => Kind::Float(number),
            Lexeme::Op("(") => {
                self.skip();
                let value = self.nested(|parser| parser.tuple_or_empty(true, &[], true))?;
                self.require(")")?;
                return Ok(value);
            }
            Lexeme::Op("[") => return self.nested(Parser::list),
            Lexeme::Op("{") => return self.nested(Parser::dict),
            _ => return Err(self.unexpected("an expression")),
        };
        // The first string again, for the case that there were several.
        self.skip();
        self.expr(line, kind)
    }

    fn list(&mut self) -> Outcome<Expr> {
        let line = self.line();
        self.skip();
        let mut items = Vec::new();
        while !self.is_op("]") {
            items.push(self.expression()?);
            if !self.eat(",") {
                break;
            }
        }
        self.require("]")?;
        self.expr(line, Kind::List(items))
    }

    fn dict(&mut self) -> Outcome<Expr> {
        let line = self.line();
        self.skip();
        let mut items = Vec::new();
        while !self.is_op("}") {
            let key = self.expression()?;
            self.require(":")?;
            items.push((key, self.expression()?));
            if !self.eat(",") {
                break;
            }
        }
        self.require("}")?;
        self.expr(line, Kind::Dict(items))
    }

    fn postfix(&mut self, mut value: Expr) -> Outcome<Expr> {
        loop {
            let line = self.line();
            value = if self.eat(".") {
                let kind = match self.peek().clone() {
                    Lexeme::Name(name) => Kind::Attribute(Box::new(value), name),
                    Lexeme::Int(index) => {
                        let index = self.expr(line, Kind::Int(index))?;
                        Kind::Item(Box::new(value), Box::new(index))
                    }
                    _ => return Err(self.unexpected("a name or a number")),
                };
                self.skip();
                self.expr(line, kind)?
            } else if self.is_op("[") {
                self.nested(|parser| parser.subscript(value))?
            } else if self.is_op("(") {
                self.call(value)?
            } else {
                return Ok(value);
            };
        }
    }

    /// `value[index]`, `value[start:stop:step]` or `value[a, b]`.
    fn subscript(&mut self, value: Expr) -> Outcome<Expr> {
        let line = self.line();
        self.skip();
        let mut indices = Vec::new();
        while !self.is_op("]") {
            if !indices.is_empty() {
                self.require(",")?;
            }
            let start = match self.is_op(":") {
                true => None,
                false => Some(Box::new(self.expression()?)),
            };
            if !self.eat(":") {
                indices.extend(start.map(|index| *index));
                continue;
            }
            let mut bounds = [start, None, None];
            let ends = |parser: &Parser| parser.is_op("]") || parser.is_op(",");
            if !ends(self) && !self.is_op(":") {
                bounds[1] = Some(Box::new(self.expression()?));
            }
            if self.eat(":") && !ends(self) {
                bounds[2] = Some(Box::new(self.expression()?));
            }
            if !indices.is_empty() || !self.eat("]") {
                return Err(self.unexpected("']' after a slice"));
            }
            return self.expr(line, Kind::Slice(Box::new(value), bounds));
        }
        self.skip();
        let index = match indices.len() {
            1 => indices.remove(0),
            _ => self.expr(line, Kind::Tuple(indices))?,
        };
        self.expr(line, Kind::Item(Box::new(value), Box::new(index)))
    }

    fn call(&mut self, called: Expr) -> Outcome<Expr> {
        let line = self.line();
        let args = self.nested(Parser::args)?;
        self.expr(line, Kind::Call(Box::new(called), Box::new(args)))
    }

    fn args(&mut self) -> Outcome<Args> {
        let line = self.line();
        let mut args = Args::default();
        self.require("(")?;
        while !self.is_op(")") {
            let keyword = matches!(self.peek(), Lexeme::Name(_)) && matches!(self.peek_second(), Lexeme::Op("="));
            let ordered = if self.eat("*") {
                let ordered = args.more.is_none() && args.more_named.is_none();
                args.more = Some(Box::new(self.expression()?));
                ordered
            } else if self.eat("**") {
                let ordered = args.more_named.is_none();
                args.more_named = Some(Box::new(self.expression()?));
                ordered
            } else if keyword {
                let ordered = args.more_named.is_none();
                let name = self.name()?;
                self.skip();
                let repeated = args.named.len() >= MAX_ARGUMENTS || args.named.iter().any(|(known, _)| *known == name);
                args.named.push((name, self.expression()?));
                ordered && !repeated
            } else {
                let ordered = args.more.is_none() && args.more_named.is_none() && args.named.is_empty();
                args.positional.push(self.expression()?);
                ordered
            };
            if !ordered {
                return Err(syntax("invalid order or number of the arguments of a call").at(line));
            }
            if !self.eat(",") {
                break;
            }
        }
        self.require(")")?;
        Ok(args)
    }

    /// The name of a filter or a test, which may have dots.
    fn dotted(&mut self) -> Outcome<Arc<str>> {
        let mut name = self.name()?.to_string();
        while self.eat(".") {
            name.push('.');
            name.push_str(&self.name()?);
        }
        Ok(name.into())
    }

    /// A filter with its arguments, after the `|`.
    pub(super) fn applied(&mut self) -> Outcome<Applied> {
        let line = self.line();
        let name = self.dotted()?;
        let args = match self.is_op("(") {
            true => self.nested(Parser::args)?,
            false => Args::default(),
        };
        Ok(Applied { name, args, line })
    }

    /// A test after `is`. One argument may stand without parentheses.
    fn test(&mut self, value: Expr, line: u32) -> Outcome<Expr> {
        let negated = self.eat_name("not");
        let name = self.dotted()?;
        let ends = ["else", "or", "and"].iter().any(|name| self.is_name(name));
        let args = match self.peek() {
            Lexeme::Op("(") => self.nested(Parser::args)?,
            Lexeme::Name(_) | Lexeme::Str(_) | Lexeme::Int(_) | Lexeme::Float(_) | Lexeme::Op("[" | "{") if !ends => {
                if self.is_name("is") {
                    return Err(syntax("tests cannot be chained with 'is'").at(line));
                }
                let argument = self.primary()?;
                Args {
                    positional: vec![self.postfix(argument)?],
                    ..Args::default()
                }
            }
            _ => Args::default(),
        };
        let applied = Applied { name, args, line };
        let test = self.expr(line, Kind::Test(Box::new(value), Box::new(applied)))?;
        match negated {
            true => self.expr(line, Kind::Not(Box::new(test))),
            false => Ok(test),
        }
    }
}
