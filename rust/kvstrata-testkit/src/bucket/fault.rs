//! What goes wrong with a request, and with which.

use std::time::Duration;

/// A request's method; listings are told from reads of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// GET of an object.
    Get,
    /// HEAD of an object.
    Head,
    /// PUT of an object.
    Put,
    /// DELETE of an object.
    Delete,
    /// GET of the bucket.
    List,
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketFault {
    /// It is answered after this time.
    Latency(Duration),
    /// It is answered, as if nothing were wrong, once all faults are over.
    Hold,
    /// The body of its answer comes so many bytes at a time, with a pause after each.
    Trickle(usize, Duration),
    /// It is answered, as if nothing were wrong.
    Nothing,
    /// The connection is reset before it is answered.
    Reset,
    /// The connection is reset in the middle of its answer's body, or of its own.
    ResetHalfway,
    /// It is answered, and the connection then neither closed nor used.
    SlowClose,
    /// It is answered with this status.
    Status(u16),
    /// It is answered with this status and this code in the body.
    Refuse(u16, &'static str),
    /// It is answered with this status while its body is left unread, or is taken by sips.
    EarlyStatus(u16),
    /// Its answer's body has half of the bytes that the header says, then the connection is closed.
    Truncate,
    /// Its answer is of half the length, and says so.
    Short,
    /// It is answered with this status and far more bytes than there is room for, of which some
    /// come before the connection is closed.
    Endless(u16),
    /// One bit of its answer's body is wrong.
    WrongBody,
    /// It is done, and never answered.
    NeverAnswer,
    /// It is done, and the connection is reset instead of an answer.
    LoseAnswer,
}

/// Which requests meet which fault.
#[derive(Clone, Debug)]
pub struct Rule {
    /// These methods.
    pub methods: Vec<Method>,
    /// Names of objects that contain this.
    pub part: String,
    /// What happens.
    pub fault: BucketFault,
    /// How their bodies are taken: so many bytes at a time, with a pause after each.
    pub sips: Option<(usize, Duration)>,
    /// So many times; `None`: always.
    pub times: Option<usize>,
}

impl Rule {
    /// Every request by one of these methods for a row.
    pub fn rows(methods: &[Method], fault: BucketFault) -> Self {
        Self {
            methods: methods.to_vec(),
            part: "/rows/".to_owned(),
            fault,
            sips: None,
            times: None,
        }
    }

    /// Every request there is.
    pub fn all(fault: BucketFault) -> Self {
        Self {
            methods: vec![
                Method::Get,
                Method::Head,
                Method::Put,
                Method::Delete,
                Method::List,
            ],
            part: String::new(),
            fault,
            sips: None,
            times: None,
        }
    }

    /// The same, and their bodies are taken so many bytes at a time, with a pause after each.
    #[must_use]
    pub fn by_sips(mut self, bytes: usize, pause: Duration) -> Self {
        self.sips = Some((bytes, pause));
        self
    }

    /// The same, so many times only.
    #[must_use]
    pub fn times(mut self, times: usize) -> Self {
        self.times = Some(times);
        self
    }
}

/// What a request meets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Met {
    pub(super) fault: BucketFault,
    pub(super) sips: Option<(usize, Duration)>,
}

/// What a request meets: what the first rule says that is for it.
pub(super) fn choose(rules: &mut [Rule], method: Method, name: &str) -> Option<Met> {
    let rule = rules.iter_mut().find(|rule| {
        rule.methods.contains(&method) && name.contains(&rule.part) && rule.times != Some(0)
    })?;
    if let Some(times) = &mut rule.times {
        *times -= 1;
    }
    let Rule { fault, sips, .. } = *rule;
    Some(Met { fault, sips })
}
