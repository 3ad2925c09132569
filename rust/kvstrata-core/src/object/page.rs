//! A page of a listing without names that no path of ours can have.
//!
//! The client fails a whole page, and ends the listing, for one object that is named `a//b` or `..`
//! or has a control character in its name; and it takes `a/` for `a`.

/// Elements of a page that stand for one name, and the element of the name: S3's, then Azure's.
const ENTRIES: [(&str, &str); 4] = [
    ("Contents", "Key"),
    ("CommonPrefixes", "Prefix"),
    ("Blob", "Name"),
    ("BlobPrefix", "Name"),
];

/// The page without odd names, and how many those were; `None` where there are none.
pub(super) fn without_odd_names(page: &[u8]) -> Option<(Vec<u8>, u64)> {
    let text = String::from_utf8_lossy(page);
    let mut spans = Vec::new();
    for (entry, name) in ENTRIES {
        let (begin, end) = (format!("<{entry}>"), format!("</{entry}>"));
        let (open, close) = (format!("<{name}"), format!("</{name}>"));
        let is_prefix = entry.ends_with("Prefixes") || entry.ends_with("Prefix");
        let mut from = 0_usize;
        while let Some(rest) = text.get(from..)
            && let Some(at) = rest.find(&begin)
            && let Some(length) = rest.get(at..).and_then(|rest| rest.find(&end))
        {
            let start = from.saturating_add(at);
            from = start.saturating_add(length).saturating_add(end.len());
            let body = text.get(start..from).unwrap_or("");
            if !body.find(&open).is_some_and(|at| {
                let named = body.get(at..).and_then(|rest| rest.split_once('>'));
                let named = named.and_then(|(_, rest)| rest.split_once(&close));
                named.is_some_and(|(name, _)| is_plain(name, is_prefix))
            }) {
                spans.push(start..from);
            }
        }
    }
    if spans.is_empty() {
        return None;
    }
    spans.sort_unstable_by_key(|span| span.start);
    let mut kept = String::with_capacity(text.len());
    let mut from = 0_usize;
    for span in &spans {
        kept.push_str(text.get(from..span.start).unwrap_or(""));
        from = span.end;
    }
    kept.push_str(text.get(from..).unwrap_or(""));
    let odd = u64::try_from(spans.len()).unwrap_or(u64::MAX);
    Some((kept.into_bytes(), odd))
}

/// Whether a name, as it stands in XML, is one that a path can have.
fn is_plain(written: &str, is_prefix: bool) -> bool {
    let unescaped;
    let mut name = written;
    if written.contains('&') {
        let Some(text) = unescape(written) else {
            return false;
        };
        unescaped = text;
        name = &unescaped;
    }
    if is_prefix {
        name = name.strip_suffix('/').unwrap_or(name);
    }
    let strange = |part: &str| {
        matches!(part, "" | "." | "..") || part.bytes().any(|byte| byte.is_ascii_control())
    };
    !name.split('/').any(strange)
}

/// The text that stands for itself in XML.
fn unescape(written: &str) -> Option<String> {
    let mut text = String::with_capacity(written.len());
    let mut rest = written;
    while let Some((before, after)) = rest.split_once('&') {
        text.push_str(before);
        let (entity, behind) = after.split_once(';')?;
        text.push(match entity {
            "amp" => '&',
            "lt" => '<',
            "gt" => '>',
            "quot" => '"',
            "apos" => '\'',
            _ => {
                let number = entity.strip_prefix('#')?;
                let code = match number.strip_prefix(['x', 'X']) {
                    Some(digits) => u32::from_str_radix(digits, 16).ok()?,
                    None => number.parse().ok()?,
                };
                char::from_u32(code)?
            }
        });
        rest = behind;
    }
    text.push_str(rest);
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(name: &str) -> String {
        format!("<Contents><Key>{name}</Key><Size>1</Size></Contents>")
    }

    #[test]
    fn odd_names_are_left_out_and_all_others_kept() {
        let plain = ["a", "a/b.c", "a b/\u{e9}", "a&amp;b", "..a/b..", "&lt;x"];
        let odd = [
            "a//b",
            "/a",
            "a/",
            "..",
            "a/./b",
            "a/../b",
            "a&#x1;b",
            "a\u{7f}",
            "",
            "a&nothing;b",
            "&#x2e;&#x2e;/x",
        ];
        let page = |names: &[&str]| {
            let all: String = names.iter().map(|name| contents(name)).collect();
            format!("<ListBucketResult><Prefix>x//</Prefix>{all}<More>1</More></ListBucketResult>")
        };
        assert_eq!(without_odd_names(page(&plain).as_bytes()), None);
        let mut mixed = Vec::new();
        for (plain, odd) in plain.iter().zip(&odd) {
            mixed.extend([*odd, *plain]);
        }
        mixed.extend(&odd[plain.len()..]);
        let cleaned = without_odd_names(page(&mixed).as_bytes());
        assert_eq!(cleaned, Some((page(&plain).into_bytes(), 11)));
    }

    #[test]
    fn prefixes_end_in_a_slash_and_azures_names_are_read_too() {
        let page = "<CommonPrefixes><Prefix>a/b/</Prefix></CommonPrefixes>\
                    <BlobPrefix><Name>a/</Name></BlobPrefix><Blob><Name Encoded=\"true\">a</Name></Blob>";
        assert_eq!(without_odd_names(page.as_bytes()), None);
        let odd = "<CommonPrefixes><Prefix>a//</Prefix></CommonPrefixes>\
                   <Blob><Name>a//b</Name><Properties/></Blob>";
        let both = format!("{page}{odd}");
        assert_eq!(
            without_odd_names(both.as_bytes()),
            Some((page.as_bytes().to_vec(), 2))
        );
    }

    #[test]
    fn a_page_that_is_cut_is_left_as_it_is() {
        for page in ["", "<Contents>", "<Contents><Key>a//b"] {
            assert_eq!(without_odd_names(page.as_bytes()), None);
        }
        assert_eq!(without_odd_names(&[0xFF; 3]), None);
    }
}
