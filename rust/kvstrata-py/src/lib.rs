//! `kvstrata._native`: converts, detaches, converts. No logic lives here.
