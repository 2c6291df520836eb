//! Dates for `strftime_now`: a moment split into calendar fields, written by a Python format string.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// A moment in UTC, proleptic Gregorian calendar.
#[derive(Clone, Copy)]
struct Moment {
    year: i64,
    /// 0 to 11.
    month: usize,
    day: i64,
    /// 1 to 366.
    day_of_year: i64,
    /// 0 is Sunday.
    weekday: usize,
    /// Since midnight.
    second: i64,
    microsecond: u32,
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

impl Moment {
    fn new(time: SystemTime) -> Moment {
        let (seconds, microsecond) = match time.duration_since(UNIX_EPOCH) {
            Ok(after) => (after.as_secs() as i64, after.subsec_micros()),
            // Whole seconds are enough before 1970.
            Err(before) => (-(before.duration().as_secs() as i64), 0),
        };
        let days = seconds.div_euclid(86_400);
        // 400 years have 146,097 days; count from 2000-01-01, the start of such a cycle.
        let since_2000 = days - 10_957;
        let mut year = 2000 + 400 * since_2000.div_euclid(146_097);
        let mut rest = since_2000.rem_euclid(146_097);
        while rest >= 365 + i64::from(is_leap(year)) {
            rest -= 365 + i64::from(is_leap(year));
            year += 1;
        }
        let day_of_year = rest + 1;
        let lengths = [
            31,
            28 + i64::from(is_leap(year)),
            31,
            30,
            31,
            30,
            31,
            31,
            30,
            31,
            30,
            31,
        ];
        let mut month = 0;
        while rest >= lengths[month] {
            rest -= lengths[month];
            month += 1;
        }
        // 1970-01-01 was a Thursday.
        let weekday = (days + 4).rem_euclid(7) as usize;
        Moment {
            year,
            month,
            day: rest + 1,
            day_of_year,
            weekday,
            second: seconds.rem_euclid(86_400),
            microsecond,
        }
    }
}

/// `time` (read as UTC) written by `format`, with the directives of Python's `strftime` in the C locale.
///
/// Errors: the directive that is not known.
pub(super) fn strftime(format: &str, time: SystemTime) -> Result<String, String> {
    let now = Moment::new(time);
    let (hour, minute, second) = (now.second / 3600, now.second / 60 % 60, now.second % 60);
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let padded = directive != Some('-');
        if !padded {
            directive = chars.next();
        }
        let number = |value: i64, width: usize| {
            if padded {
                format!("{value:0width$}")
            } else {
                value.to_string()
            }
        };
        let week = |first: usize| (now.day_of_year + 6 - ((now.weekday + 7 - first) % 7) as i64) / 7;
        let text = match directive {
            Some('Y') => now.year.to_string(),
            Some('C') => number(now.year / 100, 2),
            Some('y') => number(now.year.rem_euclid(100), 2),
            Some('m') => number(now.month as i64 + 1, 2),
            Some('d') => number(now.day, 2),
            Some('e') => format!("{:>2}", now.day),
            Some('j') => number(now.day_of_year, 3),
            Some('H') => number(hour, 2),
            Some('I') => number(hour12, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('f') => format!("{:06}", now.microsecond),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_string(),
            Some('A') => DAYS[now.weekday].to_string(),
            Some('a') => DAYS[now.weekday][..3].to_string(),
            Some('w') => now.weekday.to_string(),
            Some('u') => ((now.weekday + 6) % 7 + 1).to_string(),
            Some('B') => MONTHS[now.month].to_string(),
            Some('b' | 'h') => MONTHS[now.month][..3].to_string(),
            Some('U') => number(week(0), 2),
            Some('W') => number(week(1), 2),
            Some('F') => strftime("%Y-%m-%d", time)?,
            Some('T' | 'X') => strftime("%H:%M:%S", time)?,
            Some('R') => strftime("%H:%M", time)?,
            Some('D' | 'x') => strftime("%m/%d/%y", time)?,
            Some('c') => strftime("%a %b %e %H:%M:%S %Y", time)?,
            // Python writes nothing for a time without a zone.
            Some('z' | 'Z') => String::new(),
            Some('n') => "\n".to_string(),
            Some('t') => "\t".to_string(),
            Some('%') => "%".to_string(),
            Some(other) => return Err(format!("'%{other}' is not a known directive")),
            None => return Err("the format ends in '%'".to_string()),
        };
        out.push_str(&text);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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
        let now = at(1_749_978_307);
        assert_eq!(
            strftime("%d %b %Y|%-d %B %y|%I:%M %p|%e|%a %w %u|%%|%Z", now).unwrap(),
            "15 Jun 2025|15 June 25|09:05 AM|15|Sun 0 7|%|"
        );
        assert_eq!(strftime("%-I %-H", at(0)).unwrap(), "12 0");
        assert!(strftime("%Q", now).unwrap_err().contains("%Q"));
        assert!(strftime("100%", now).is_err());
    }
}
