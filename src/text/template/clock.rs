//! Dates for `strftime_now`: a moment in UTC, written by a Python format string.

use jiff::Timestamp;
use jiff::fmt::strtime::{BrokenDownTime, Config, PosixCustom};
use jiff::tz::Offset;
use std::time::SystemTime;

/// The directives of Python's `strftime`, without those that depend on the platform.
const DIRECTIVES: &str = "YCymdejHIMSfpAawuBbhUWFTXRDxczZnt%";

/// Writes `time` (in UTC, without a time zone) by `format`, as Python's `strftime` does in the C locale. `%-d` is `%d`
/// without padding.
///
/// Errors: a message that names an unknown directive, or a time outside the years -9999 to 9999.
pub(super) fn strftime(format: &str, time: SystemTime) -> Result<String, String> {
    let time = Timestamp::try_from(time).map_err(|err| err.to_string())?;
    let fields = BrokenDownTime::from(Offset::UTC.to_datetime(time));
    let config = Config::new().custom(PosixCustom::new());
    fields
        .to_string_with_config(&config, &for_jiff(format)?)
        .map_err(|err| err.to_string())
}

/// Translates `format` from Python's directives to those of `jiff`, which knows more of them and differs in three.
fn for_jiff(format: &str) -> Result<String, String> {
    let mut out = String::with_capacity(format.len());
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let flag = if directive == Some('-') {
            directive = chars.next();
            "-"
        } else {
            ""
        };
        match directive {
            // Python writes microseconds, and nothing for a time without a zone.
            Some('f') => out.push_str("%6f"),
            Some('z' | 'Z') => {}
            Some(c) if DIRECTIVES.contains(c) => out.extend(["%", flag, c.encode_utf8(&mut [0; 4])]),
            Some(other) => return Err(format!("'%{other}' is not a known directive")),
            None => return Err("the format ends in '%'".to_string()),
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, UNIX_EPOCH};

    fn at(seconds: i64) -> SystemTime {
        if seconds < 0 {
            UNIX_EPOCH - Duration::from_secs(seconds.unsigned_abs())
        } else {
            UNIX_EPOCH + Duration::from_secs(seconds as u64)
        }
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        // Values from Python's datetime.
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00 Thursday 001 00 00"),
            (951_782_400, "2000-02-29 00:00:00 Tuesday 060 09 09"),
            (1_735_689_599, "2024-12-31 23:59:59 Tuesday 366 52 53"),
            (1_749_978_307, "2025-06-15 09:05:07 Sunday 166 24 23"),
            (4_107_542_399, "2100-02-28 23:59:59 Sunday 059 09 08"),
            (-1, "1969-12-31 23:59:59 Wednesday 365 52 52"),
        ] {
            assert_eq!(strftime("%F %T %A %j %U %W", at(seconds)).unwrap(), expected);
        }
    }

    #[test]
    fn directives_follow_python() {
        let now = at(1_749_978_307) + Duration::from_micros(4_200);
        assert_eq!(
            strftime("%d %b %Y|%-d %B %y|%I:%M %p|%e|%a %w %u|%%|%Z", now).unwrap(),
            "15 Jun 2025|15 June 25|09:05 AM|15|Sun 0 7|%|"
        );
        assert_eq!(
            strftime("%c|%x|%X|%D|%R|%C|%f|%h|%z|%n|%t|", now).unwrap(),
            "Sun Jun 15 09:05:07 2025|06/15/25|09:05:07|06/15/25|09:05|20|004200|Jun||\n|\t|"
        );
        assert_eq!(strftime("%-I %-H %-j %-y %e", at(0)).unwrap(), "12 0 1 70  1");
        assert!(strftime("%Q", now).unwrap_err().contains("%Q"));
        assert!(strftime("100%", now).is_err());
    }
}
