//! Python's arithmetic. Integers have 127 bits; a result beyond that is an error.

use super::ast::Binary;
use super::limits::{Fault, Outcome};
use super::value::Value;

/// The operator as it is written.
fn symbol(operator: Binary) -> &'static str {
    match operator {
        Binary::Add => "+",
        Binary::Sub => "-",
        Binary::Mul => "*",
        Binary::Div => "/",
        Binary::FloorDiv => "//",
        Binary::Mod => "%",
        Binary::Pow => "**",
    }
}

/// The error for operands that an operator does not take.
pub(super) fn unsupported(operator: Binary, a: &Value, b: &Value) -> Box<Fault> {
    Fault::invalid(format!(
        "unsupported operand type(s) for {}: '{}' and '{}'",
        symbol(operator),
        a.kind(),
        b.kind()
    ))
}

/// The error for an integer of more than 127 bits.
pub(super) fn too_large() -> Box<Fault> {
    Fault::invalid("an integer has more than 127 bits, which is not supported")
}

fn division_by_zero() -> Box<Fault> {
    Fault::invalid("division by zero")
}

/// `-value` or `+value`.
pub(super) fn signed(value: &Value, negative: bool) -> Outcome<Value> {
    match (value, value.as_int()) {
        (_, Some(number)) if negative => number.checked_neg().map(Value::Int).ok_or_else(too_large),
        (_, Some(number)) => Ok(Value::Int(number)),
        (Value::Float(number), _) => Ok(Value::Float(if negative { -number } else { *number })),
        (Value::Undefined(reason), _) => Err(Fault::invalid(&**reason)),
        _ => Err(Fault::invalid(format!(
            "bad operand type for a sign: '{}'",
            value.kind()
        ))),
    }
}

/// The value as a float, which is the nearest one for an integer.
pub(super) fn as_float(value: &Value) -> Option<f64> {
    match value {
        Value::Float(number) => Some(*number),
        other => other.as_int().map(|number| number as f64),
    }
}

/// The result for two numbers. None if one is no number.
pub(super) fn numbers(operator: Binary, a: &Value, b: &Value) -> Option<Outcome<Value>> {
    match (a.as_int(), b.as_int()) {
        (Some(a), Some(b)) => Some(integers(operator, a, b)),
        _ => Some(floats(operator, as_float(a)?, as_float(b)?).map(Value::Float)),
    }
}

fn integers(operator: Binary, a: i128, b: i128) -> Outcome<Value> {
    let result = match operator {
        Binary::Add => a.checked_add(b),
        Binary::Sub => a.checked_sub(b),
        Binary::Mul => a.checked_mul(b),
        Binary::Div => return divide(a, b).map(Value::Float),
        Binary::FloorDiv | Binary::Mod if b == 0 => return Err(division_by_zero()),
        Binary::FloorDiv => a.checked_div_euclid(b).and_then(|quotient| {
            // Euclid rounds so that the remainder is positive, Python so that it has the sign of the divisor.
            let euclid = a.checked_rem_euclid(b)?;
            if b < 0 && euclid != 0 {
                quotient.checked_sub(1)
            } else {
                Some(quotient)
            }
        }),
        Binary::Mod => a
            .checked_rem_euclid(b)
            .map(|rest| if b < 0 && rest != 0 { rest + b } else { rest }),
        Binary::Pow if b < 0 => return floats(operator, a as f64, b as f64).map(Value::Float),
        Binary::Pow => match (a, u32::try_from(b)) {
            (0 | 1, _) => Some(if b == 0 { 1 } else { a }),
            (-1, _) => Some(if b % 2 == 0 { 1 } else { -1 }),
            (_, Ok(b)) => a.checked_pow(b),
            (_, Err(_)) => None,
        },
    };
    result.map(Value::Int).ok_or_else(too_large)
}

/// `a / b`, rounded once.
fn divide(a: i128, b: i128) -> Outcome<f64> {
    if b == 0 {
        return Err(division_by_zero());
    }
    let exact = 1 << 53;
    let (n, d) = (a.unsigned_abs(), b.unsigned_abs());
    if n <= exact && d <= exact {
        return Ok(a as f64 / b as f64);
    }
    // 64 bits of the quotient, the last one set if anything follows: the conversion rounds them correctly.
    let (mut quotient, mut rest, mut exponent) = (n / d, n % d, 0);
    while quotient < 1 << 63 && rest != 0 {
        (quotient, rest) = (quotient << 1, rest << 1);
        if rest >= d {
            quotient |= 1;
            rest -= d;
        }
        exponent -= 1;
    }
    let value = (quotient | u128::from(rest != 0)) as f64 * 2f64.powi(exponent);
    Ok(if (a < 0) != (b < 0) { -value } else { value })
}

fn floats(operator: Binary, a: f64, b: f64) -> Outcome<f64> {
    Ok(match operator {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div | Binary::FloorDiv | Binary::Mod if b == 0.0 => return Err(division_by_zero()),
        Binary::Div => a / b,
        Binary::FloorDiv => floor_divide(a, b).0,
        Binary::Mod => floor_divide(a, b).1,
        Binary::Pow => {
            if a == 0.0 && b < 0.0 {
                return Err(division_by_zero());
            }
            let power = a.powf(b);
            if power.is_nan() && !a.is_nan() && !b.is_nan() {
                return Err(Fault::invalid("complex numbers are not supported"));
            }
            if power.is_infinite() && a.is_finite() && b.is_finite() {
                return Err(Fault::invalid("the result of ** is too large"));
            }
            power
        }
    })
}

/// Quotient and remainder, as Python computes them.
fn floor_divide(a: f64, b: f64) -> (f64, f64) {
    let mut rest = a % b;
    let mut quotient = (a - rest) / b;
    if rest == 0.0 {
        rest = 0f64.copysign(b);
    } else if (b < 0.0) != (rest < 0.0) {
        rest += b;
        quotient -= 1.0;
    }
    if quotient == 0.0 {
        return (0f64.copysign(a / b), rest);
    }
    let floor = quotient.floor();
    (if quotient - floor > 0.5 { floor + 1.0 } else { floor }, rest)
}
