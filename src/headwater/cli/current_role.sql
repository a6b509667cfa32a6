-- The role of this session, and whether it may write audit events, as an administrator may.
select session_user::text, has_function_privilege('headwater_internal.audit(text, text, text, jsonb)', 'execute')
